"""The picture as a figure: lifelines down, every round a band in which its flows travel.

A flow starts below the cells that it reads and ends above the cells that it writes. Its width is
the number of chunks that it carries. All lengths are inches; y grows downward.
"""

from __future__ import annotations

from typing import Any

from pycoll.draw.canvas import Canvas, Point
from pycoll.draw.legend import Legend
from pycoll.draw.marks import HEAD, draw_head, draw_ribbon, draw_source
from pycoll.draw.picture import Flow, Picture, Round, chunk_label
from pycoll.draw.style import (
    CELL_HEIGHT,
    GRID,
    INK,
    MARGIN,
    MUTED,
    PAPER,
    SHADE,
    chunk_colors,
    ink_on,
    tint,
)

_NAMES = 0.80  # the column of the rounds' names
_STUB = 0.25  # of a flow that leaves or enters the picture
_NEIGHBOUR = 0.45  # its note: from which rank, to which
_HEADER = 1.25  # title, caption, names of ranks
_GAP = 0.07  # between cells and flows
_RAIL = 0.17  # between rails
_MAX_LINES = 8  # of a flow; more chunks are thinned out
_MAX_LABELS = 24  # flows of one round, beyond which they carry no labels


def draw_figure(picture: Picture) -> Any:
    """Draws a picture as a matplotlib Figure.

    Args:
        picture: what to draw.

    Returns:
        A matplotlib.figure.Figure that no global state knows.
    """
    return _Drawing(picture).draw()


class _Drawing:
    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        n, chunks = picture.num_ranks, picture.num_chunks
        self._colors = chunk_colors(chunks)
        self._notes: list[tuple[bool, float]] = []  # beside the picture: on its left, y
        self._cell = min(0.20, max(0.05, 1.9 / chunks))
        self._pitch = max(1.15, chunks * self._cell + 0.38)
        wraps = any(flow.shift for step in picture.rounds for flow in step.flows)
        self._stub = _STUB if wraps else 0.15
        neighbours = _NEIGHBOUR if wraps else 0.0
        self._left = MARGIN + _NAMES + neighbours + self._stub
        self._right = self._left + n * self._pitch
        width = max(self._right + self._stub + neighbours + MARGIN, _caption_width(picture))

        self._rows = [_pack(step.flows) if step.bundled else [] for step in picture.rounds]
        self._bands = [
            self._band_height(step, rows)
            for step, rows in zip(picture.rounds, self._rows, strict=True)
        ]
        strips = CELL_HEIGHT * (1 + len(self._bands))
        self._bottom = _HEADER + sum(self._bands) + strips
        self._legend = Legend(picture, self._colors, width)
        self._canvas = Canvas(width, self._bottom + self._legend.height)

    def draw(self) -> Any:
        self._titles()
        y = _HEADER
        for rank in range(self._picture.num_ranks):
            x = self._lifeline(rank)
            self._canvas.line((x, y), (x, self._bottom), GRID, 1.0, z=1)
        self._strip(y, self._picture.start, frozenset())
        self._name(y + CELL_HEIGHT / 2, "start")
        y += CELL_HEIGHT
        for i, (step, band) in enumerate(zip(self._picture.rounds, self._bands, strict=True)):
            if i % 2 == 0:
                width = self._right + self._stub - MARGIN
                self._canvas.box(MARGIN, y, width, band + CELL_HEIGHT, fill=SHADE, z=0)
            self._name(y + band / 2, f"round {step.idx}")
            if step.bundled:
                self._rails(self._rows[i], y, y + band)
            else:
                self._arrows(step, y + _GAP, y + band - _GAP)
            y += band
            self._strip(y, step.held, step.changed)
            y += CELL_HEIGHT
        if not self._picture.wants_everything:
            self._underline_wanted(y)
        self._legend.draw(self._canvas, self._bottom)
        return self._canvas.figure()

    # Geometry.

    def _band_height(self, step: Round, rows: list[list[Flow]]) -> float:
        if step.bundled:
            return 2 * _GAP + _RAIL * (len(rows) + 0.6)
        n = self._picture.num_ranks
        hops = max(n - f.hops if f.shift else f.hops for f in step.flows)
        widest = max(flow.chunks[1] for flow in step.flows)
        return 2 * _GAP + 0.40 + 0.12 * min(hops, 8) + 0.06 * min(widest, _MAX_LINES)

    def _lifeline(self, rank: int) -> float:
        return self._left + (rank + 0.5) * self._pitch

    def _at(self, rank: int, flow: Flow) -> float:
        """The middle of the flow's cells of a rank."""
        first, count = flow.chunks
        cells = first + count / 2 - self._picture.num_chunks / 2
        return self._lifeline(rank) + cells * self._cell

    # Frame.

    def _titles(self) -> None:
        self._canvas.text(MARGIN, 0.32, self._picture.title, 15, INK, bold=True)
        self._canvas.text(MARGIN, 0.62, self._picture.caption, 9.5, MUTED)
        for rank in range(self._picture.num_ranks):
            x, y = self._lifeline(rank), _HEADER - 0.2
            self._canvas.text(x, y, f"rank {rank}", 10, INK, bold=True, align="center")

    def _name(self, y: float, name: str) -> None:
        self._canvas.text(MARGIN + 0.10, y, name, 9, MUTED)

    # What ranks hold.

    def _strip(
        self,
        y: float,
        held: tuple[tuple[int, ...], ...],
        changed: frozenset[tuple[int, int]],
    ) -> None:
        canvas, w, h = self._canvas, self._cell, CELL_HEIGHT
        for rank, row in enumerate(held):
            left = self._lifeline(rank) - self._picture.num_chunks * w / 2
            for chunk, count in enumerate(row):
                x, color = left + chunk * w, self._colors[chunk]
                filled = h * max(0, count) / self._picture.full[rank][chunk]
                canvas.box(x, y, w, h - filled, fill=tint(color) if count else PAPER, z=6)
                canvas.box(x, y + h - filled, w, filled, fill=color, z=6)
                canvas.box(x, y, w, h, edge=MUTED, line_width=0.5, z=7)
                if (rank, chunk) in changed:
                    canvas.box(x, y, w, h, edge=INK, line_width=1.5, z=8)

    def _underline_wanted(self, y: float) -> None:
        for rank, row in enumerate(self._picture.wanted):
            left = self._lifeline(rank) - self._picture.num_chunks * self._cell / 2
            for chunk, is_wanted in enumerate(row):
                if is_wanted:
                    x = left + (chunk + 0.1) * self._cell
                    self._canvas.box(x, y + 0.035, 0.8 * self._cell, 0.045, fill=INK, z=6)

    # What moves.

    def _arrows(self, step: Round, top: float, bottom: float) -> None:
        end = bottom - HEAD
        for flow in step.flows:
            x0, x1 = self._at(flow.srcs[0], flow), self._at(flow.dsts[0], flow)
            self._source(flow, (x0, top))
            if flow.shift:
                enter = self._around(flow, (x0, top), (x1, end))
                self._head(flow, enter, (x1, end))
                continue
            self._ribbon(flow, (x0, top), (x1, end))
            self._head(flow, (x0, top), (x1, end))
            # Not at the same height for both directions: they would meet in exchanges.
            part = 0.26 if x0 < x1 else 0.42
            self._chunk_label(flow, x0 + part * (x1 - x0), top + part * (end - top))

    def _around(self, flow: Flow, start: Point, end: Point) -> Point:
        """A line on a cylinder whose seam is the two edges of the picture: where it enters."""
        (x0, y0), (x1, y1) = start, end
        edges = self._left - self._stub, self._right + self._stub
        seam_out, seam_in = edges[::-1] if flow.shift > 0 else edges
        part = (seam_out - x0) / ((seam_out - x0) + (x1 - seam_in))
        y = y0 + part * (y1 - y0)
        self._ribbon(flow, start, (seam_out, y))
        self._ribbon(flow, (seam_in, y), end)
        for x, note in ((seam_out, f"to {flow.dsts[0]}"), (seam_in, f"from {flow.srcs[0]}")):
            on_left = x < self._left
            align, out = ("right", -0.05) if on_left else ("left", 0.05)
            note_y = y
            while any(at == on_left and abs(other - note_y) < 0.12 for at, other in self._notes):
                note_y += 0.13
            self._notes.append((on_left, note_y))
            self._canvas.text(x + out, note_y, note, 7.5, MUTED, align=align)
        self._chunk_label(flow, (x0 + seam_out) / 2, (y0 + y) / 2)
        return seam_in, y

    def _rails(self, rows: list[list[Flow]], top: float, bottom: float) -> None:
        num_flows = sum(map(len, rows))
        for i, row in enumerate(rows):
            y = top + _GAP + _RAIL * (i + 0.8)
            for flow in row:
                color = self._color(flow)
                first, last = self._at(flow.first_rank, flow), self._at(flow.last_rank, flow)
                self._ribbon(flow, (first, y), (last, y), halo=0.0)
                for rank in flow.srcs:
                    x = self._at(rank, flow)
                    self._canvas.line((x, top), (x, y), color, 0.8, alpha=0.6, z=1.5)
                    self._source(flow, (x, y))
                for rank in flow.dsts:
                    x = self._at(rank, flow)
                    self._canvas.line((x, y), (x, bottom), color, 0.8, alpha=0.6, z=1.5)
                    self._head(flow, (x, top), (x, y))
                if num_flows <= _MAX_LABELS:
                    self._chunk_label(flow, first + 0.5 * self._pitch, y)

    def _color(self, flow: Flow) -> str:
        """Colour of a flow's ends and label; neutral for a flow of several chunks."""
        first, count = flow.chunks
        return self._colors[first] if count == 1 else INK

    def _ribbon(self, flow: Flow, start: Point, end: Point, halo: float = 2.4) -> None:
        """Parallel lines, one per chunk.

        The halo, in points, keeps the flow apart from the lifelines that it crosses.
        """
        first, count = flow.chunks
        lines = min(count, _MAX_LINES)
        colors = [self._colors[first + i * count // lines] for i in range(lines)]
        draw_ribbon(self._canvas, start, end, colors, flow.kind, halo)

    def _source(self, flow: Flow, at: Point) -> None:
        draw_source(self._canvas, at, self._color(flow))

    def _head(self, flow: Flow, start: Point, end: Point) -> None:
        size = HEAD * (1 + 0.1 * (min(flow.chunks[1], _MAX_LINES) - 1))
        draw_head(self._canvas, start, end, self._color(flow), flow.kind, size)

    def _chunk_label(self, flow: Flow, x: float, y: float) -> None:
        if self._picture.num_chunks == 1:
            return
        label = chunk_label(flow.chunks)
        w, h = 0.065 * len(label) + 0.055, 0.125
        self._canvas.box(
            x - w / 2, y - h / 2, w, h, fill=self._color(flow), edge=PAPER, line_width=0.8, z=5.5
        )
        ink = ink_on(self._color(flow))
        self._canvas.text(x, y, label, 6.5, ink, bold=True, align="center")


def _caption_width(picture: Picture) -> float:
    return 2 * MARGIN + 0.073 * len(picture.caption)


def _pack(flows: tuple[Flow, ...]) -> list[list[Flow]]:
    """Rows of rails that do not touch: each flow goes into the first row with room."""
    rows: list[list[Flow]] = []
    for flow in flows:
        for row in rows:
            if all(flow.first_rank > f.last_rank or flow.last_rank < f.first_rank for f in row):
                row.append(flow)
                break
        else:
            rows.append([flow])
    return rows
