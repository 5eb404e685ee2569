"""The picture as a figure: lifelines down, every round a band in which its flows travel.

A flow starts below the cells that it reads and ends above the cells that it writes. Its width is
the number of chunks that it carries. All lengths are inches; y grows downward.
"""

from __future__ import annotations

from typing import Any

from pycoll.draw.picture import Flow, Picture, Round, chunk_label
from pycoll.draw.style import GRID, INK, MUTED, PAPER, SHADE, chunk_colors, new_figure, tint

_MARGIN = 0.30
_NAMES = 0.80  # the column of the rounds' names
_STUB = 0.25  # of a flow that leaves or enters the picture
_NEIGHBOUR = 0.45  # its note: from which rank, to which
_HEADER = 1.25  # title, caption, names of ranks
_LEGEND = 1.0
_STRIP = 0.24  # height of the cells
_GAP = 0.07  # between cells and flows
_RAIL = 0.17  # between rails
_HEAD = 0.062  # half the size of the mark at a flow's end
_RIBBON = 9.5  # points: widest flow
_MAX_LABELS = 24  # flows of one round, beyond which they carry no labels


def draw_figure(picture: Picture) -> Any:
    """Draws a picture as a matplotlib Figure.

    Args:
        picture: what to draw.

    Returns:
        A matplotlib.figure.Figure that no global state knows.
    """
    return _Drawing(picture).draw()


Box = list[tuple[float, float]]


class _Drawing:
    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        n, chunks = picture.num_ranks, picture.num_chunks
        self._cell = min(0.20, max(0.05, 1.9 / chunks))
        self._pitch = max(1.15, chunks * self._cell + 0.38)
        self._stub = _STUB if any(f.shift for r in picture.rounds for f in r.flows) else 0.15
        neighbours = _NEIGHBOUR if self._stub == _STUB else 0.0
        self._left = _MARGIN + _NAMES + neighbours + self._stub
        self._right = self._left + n * self._pitch
        width = max(self._right + self._stub + neighbours + _MARGIN, 6.4)
        self._bands = [self._band_height(r) for r in picture.rounds]
        height = _HEADER + _STRIP + sum(self._bands) + _STRIP * len(self._bands) + _LEGEND
        self._colors = chunk_colors(chunks)
        self._fig, self._ax = new_figure(width, height)
        self._bottom = height - _LEGEND

    def draw(self) -> Any:
        self._titles()
        y = _HEADER
        self._lifelines(y)
        self._strip(y, self._picture.start, frozenset())
        self._name(y + _STRIP / 2, "start")
        y += _STRIP
        for i, (step, band) in enumerate(zip(self._picture.rounds, self._bands, strict=True)):
            if i % 2 == 0:
                self._shade(y, y + band + _STRIP)
            self._name(y + band / 2, f"round {step.idx}")
            if step.bundled:
                self._rails(step, y)
            else:
                self._arrows(step, y + _GAP, y + band - _GAP)
            y += band
            self._strip(y, step.held, step.changed)
            y += _STRIP
        self._legend(self._bottom)
        for artist in self._ax.get_children():
            artist.set_clip_on(False)  # nothing reaches the border, and SVG repeats the clip
        return self._fig

    # Geometry.

    def _band_height(self, step: Round) -> float:
        if step.bundled:
            return 2 * _GAP + _RAIL * (len(step.flows) + 0.6)
        n = self._picture.num_ranks
        widest = max(flow.chunks[1] for flow in step.flows)
        hops = max(
            n - f.last_rank + f.first_rank if f.shift else f.last_rank - f.first_rank
            for f in step.flows
        )
        return 2 * _GAP + 0.40 + 0.12 * min(hops, 8) + 0.06 * min(widest, 8)

    def _lifeline(self, rank: int) -> float:
        return self._left + (rank + 0.5) * self._pitch

    def _at(self, rank: int, flow: Flow) -> float:
        """The middle of the flow's cells of a rank."""
        first, count = flow.chunks
        cells = first + count / 2 - self._picture.num_chunks / 2
        return self._lifeline(rank) + cells * self._cell

    # Frame.

    def _titles(self) -> None:
        x = _MARGIN
        self._ax.text(x, 0.36, self._picture.title, size=15, weight="bold", color=INK)
        self._ax.text(x, 0.64, self._picture.caption, size=9.5, color=MUTED)
        for rank in range(self._picture.num_ranks):
            self._ax.text(
                self._lifeline(rank),
                _HEADER - 0.22,
                f"rank {rank}",
                size=10,
                weight="bold",
                color=INK,
                ha="center",
                va="center",
            )

    def _lifelines(self, y: float) -> None:
        for rank in range(self._picture.num_ranks):
            x = self._lifeline(rank)
            self._ax.plot([x, x], [y, self._bottom], color=GRID, lw=1.0, zorder=1)

    def _shade(self, top: float, bottom: float) -> None:
        from matplotlib.patches import Rectangle

        left, right = _MARGIN, self._right + self._stub
        self._ax.add_patch(
            Rectangle((left, top), right - left, bottom - top, fc=SHADE, lw=0, zorder=0)
        )

    def _name(self, y: float, name: str) -> None:
        self._ax.text(_MARGIN + 0.10, y, name, size=9, color=MUTED, va="center")

    # What ranks hold.

    def _strip(
        self,
        y: float,
        held: tuple[tuple[int, ...], ...],
        changed: frozenset[tuple[int, int]],
    ) -> None:
        cells, edges = [], []
        fills: dict[str, list[Box]] = {}
        for rank, row in enumerate(held):
            left = self._lifeline(rank) - self._picture.num_chunks * self._cell / 2
            for chunk, count in enumerate(row):
                x, w = left + chunk * self._cell, self._cell
                color = self._colors[chunk]
                filled = _STRIP * count / self._picture.full[chunk]
                cells.append(_box(x, y, w, _STRIP))
                fills.setdefault(color if count else PAPER, []).append(
                    _box(x, y + _STRIP - filled, w, filled)
                )
                fills.setdefault(tint(color) if count else PAPER, []).append(
                    _box(x, y, w, _STRIP - filled)
                )
                if (rank, chunk) in changed:
                    edges.append(cells[-1])
        for color, boxes in fills.items():
            self._boxes(boxes, facecolor=color, linewidth=0, zorder=6)
        self._boxes(cells, facecolor="none", edgecolor=MUTED, linewidth=0.5, zorder=8)
        self._boxes(edges, facecolor="none", edgecolor=INK, linewidth=1.5, zorder=9)

    def _boxes(self, boxes: list[Box], **look: Any) -> None:
        """Many boxes of one look as one path, which keeps SVG files small."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        paths = [Path(box + box[:1], closed=True) for box in boxes if box[0][1] < box[2][1]]
        if paths:
            self._ax.add_patch(PathPatch(Path.make_compound_path(*paths), **look))

    # What moves.

    def _arrows(self, step: Round, top: float, bottom: float) -> None:
        labels = self._picture.num_chunks > 1 and len(step.flows) <= _MAX_LABELS
        for flow in step.flows:
            x0, x1 = self._at(flow.srcs[0], flow), self._at(flow.dsts[0], flow)
            end = bottom - _HEAD
            if not flow.shift:
                self._ribbon(flow, (x0, top), (x1, end))
                self._source(flow, x0, top)
                self._head(flow, (x0, top), (x1, end))
                if labels:
                    # Not at the same height for both directions: they would meet in exchanges.
                    part = 0.26 if x0 < x1 else 0.42
                    self._chunk_label(flow, x0 + part * (x1 - x0), top + part * (end - top))
                continue
            # One straight line on a cylinder whose seam is the two edges of the picture.
            edges = self._left - self._stub, self._right + self._stub
            seam_out, seam_in = edges[::-1] if flow.shift > 0 else edges
            part = (seam_out - x0) / ((seam_out - x0) + (x1 - seam_in))
            seam_y = top + part * (end - top)
            self._ribbon(flow, (x0, top), (seam_out, seam_y))
            self._ribbon(flow, (seam_in, seam_y), (x1, end))
            self._source(flow, x0, top)
            self._head(flow, (seam_in, seam_y), (x1, end))
            self._neighbour(seam_out, seam_y, f"to {flow.dsts[0]}")
            self._neighbour(seam_in, seam_y, f"from {flow.srcs[0]}")
            if labels:
                self._chunk_label(flow, (x0 + seam_out) / 2, (top + seam_y) / 2)

    def _rails(self, step: Round, y: float) -> None:
        for i, flow in enumerate(step.flows):
            at = y + _GAP + _RAIL * (i + 0.8)
            ranks = flow.srcs + flow.dsts
            ends = (self._at(min(ranks), flow), at), (self._at(max(ranks), flow), at)
            self._ribbon(flow, *ends, halo=0.0)
            for rank in flow.srcs:
                x = self._at(rank, flow)
                self._ax.plot(
                    [x, x], [y, at], color=self._color(flow), lw=0.8, alpha=0.6, zorder=1.5
                )
                self._source(flow, x, at)
            for rank in flow.dsts:
                x, end = self._at(rank, flow), y + self._band_height(step)
                self._ax.plot(
                    [x, x], [at, end], color=self._color(flow), lw=0.8, alpha=0.6, zorder=1.5
                )
                self._head(flow, None, (x, at))
            if self._picture.num_chunks > 1 and len(step.flows) <= _MAX_LABELS:
                self._chunk_label(flow, self._at(flow.first_rank, flow) + 0.5 * self._pitch, at)

    def _color(self, flow: Flow) -> str:
        """Of its ends and its label; a flow of several chunks has no single colour."""
        first, count = flow.chunks
        return self._colors[first] if count == 1 else INK

    def _source(self, flow: Flow, x: float, y: float) -> None:
        self._ax.plot([x], [y], "o", ms=4.6, color=self._color(flow), mew=0, zorder=5)

    def _ribbon(
        self,
        flow: Flow,
        start: tuple[float, float],
        end: tuple[float, float],
        halo: float = 2.4,
    ) -> None:
        """Parallel lines, one per chunk; more than 8 chunks are thinned out.

        The halo, in points, keeps the flow apart from the lifelines and flows that it crosses.
        """
        first, count = flow.chunks
        lines = min(count, 8)
        width = min(1.9, _RIBBON / lines)
        (x0, y0), (x1, y1) = start, end
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        # Lines are ordered left to right as the cells are, whichever way the flow goes.
        nx, ny = (y1 - y0) / length, -(x1 - x0) / length
        if nx < 0:
            nx, ny = -nx, -ny
        style = "solid" if flow.kind == "reduce" else (0, (2.2, 1.1))
        self._ax.plot(
            [x0, x1],
            [y0, y1],
            color=PAPER,
            lw=width * lines + halo,
            zorder=2,
            solid_capstyle="butt",
        )
        for i in range(lines):
            off = (i - (lines - 1) / 2) * width / 72
            color = self._colors[first + i * count // lines]
            self._ax.plot(
                [x0 + off * nx, x1 + off * nx],
                [y0 + off * ny, y1 + off * ny],
                color=color,
                lw=width,
                ls=style,
                zorder=3,
                solid_capstyle="butt",
                dash_capstyle="butt",
            )

    def _head(
        self, flow: Flow, start: tuple[float, float] | None, end: tuple[float, float]
    ) -> None:
        """A circled plus where values are combined, a hollow arrowhead where they are replaced."""
        from matplotlib.patches import Circle, Polygon

        x, y = end
        color = self._color(flow)
        if flow.kind == "reduce":
            self._ax.add_patch(Circle((x, y), _HEAD, fc=PAPER, ec=color, lw=1.2, zorder=5))
            arm = 0.6 * _HEAD
            self._ax.plot([x - arm, x + arm], [y, y], color=color, lw=1.2, zorder=6)
            self._ax.plot([x, x], [y - arm, y + arm], color=color, lw=1.2, zorder=6)
            return
        dx, dy = (0.0, 1.0) if start is None else (x - start[0], y - start[1])
        length = (dx * dx + dy * dy) ** 0.5
        dx, dy = dx / length * _HEAD * 1.25, dy / length * _HEAD * 1.25
        tip, base = (x + dx, y + dy), (x - dx, y - dy)
        corners = [
            tip,
            (base[0] - 0.8 * dy, base[1] + 0.8 * dx),
            (base[0] + 0.8 * dy, base[1] - 0.8 * dx),
        ]
        self._ax.add_patch(Polygon(corners, fc=PAPER, ec=color, lw=1.2, zorder=5))

    def _chunk_label(self, flow: Flow, x: float, y: float) -> None:
        self._ax.text(
            x,
            y,
            chunk_label(flow.chunks),
            size=6.5,
            weight="bold",
            color=PAPER,
            zorder=6,
            ha="center",
            va="center",
            bbox={"boxstyle": "round,pad=0.22", "fc": self._color(flow), "ec": PAPER, "lw": 0.8},
        )

    def _neighbour(self, x: float, y: float, name: str) -> None:
        """Says where a flow that crosses the seam goes on, or comes from."""
        on_left = x < self._left
        self._ax.text(
            x + (-0.05 if on_left else 0.05),
            y,
            name,
            size=7.5,
            color=MUTED,
            ha="right" if on_left else "left",
            va="center",
            zorder=6,
        )

    # Legend.

    def _legend(self, top: float) -> None:
        """Chunks, kinds of flow, and what a cell says; entries that do not fit start a new row."""
        self._pen = (_MARGIN + 0.1, top + 0.36)
        flows = [flow for step in self._picture.rounds for flow in step.flows]
        if 1 < self._picture.num_chunks <= 16:
            names = [str(chunk) for chunk in range(self._picture.num_chunks)]
            x, y = self._entry(0.24 * len(names) + 0.04, "chunk")
            for chunk, name in enumerate(names):
                self._swatch(x + 0.24 * chunk, y, self._colors[chunk], 1.0, name)
        notes = {
            "reduce": "reduce: combined with what is there",
            "copy": "copy: replaces what is there",
        }
        for kind, note in notes.items():
            if any(flow.kind == kind for flow in flows):
                x, y = self._entry(0.58, note)
                flow = Flow(kind, (0, 1), (0,), (0,))
                self._ribbon(flow, (x, y), (x + 0.42, y))
                self._source(flow, x, y)
                self._head(flow, (x, y), (x + 0.42, y))
        full = max(self._picture.full)
        if full > 1:
            self._swatch(
                *self._entry(0.28, f"1 of {full} contributions"), self._colors[0], 1 / full
            )
        self._swatch(*self._entry(0.28, "complete"), self._colors[0], 1.0)
        self._swatch(*self._entry(0.28, "written in this round"), PAPER, 0.0, edge=INK)

    def _entry(self, width: float, note: str) -> tuple[float, float]:
        """Writes a note beside room for its sign, and returns where the sign is."""
        x, y = self._pen
        whole = width + 0.064 * len(note)
        if x + whole > self._fig.get_figwidth() - _MARGIN:
            x, y = _MARGIN + 0.1, y + 0.36
        self._ax.text(x + width, y, note, size=8.5, color=MUTED, va="center")
        self._pen = (x + whole + 0.25, y)
        return x, y

    def _swatch(
        self, x: float, y: float, color: str, filled: float, name: str = "", edge: str = MUTED
    ) -> None:
        top, part = y - _STRIP / 2, _STRIP * filled
        whole = [_box(x, top, 0.2, _STRIP)]
        back = tint(color) if color != PAPER else PAPER
        lw = 0.5 if edge == MUTED else 1.5
        self._boxes(whole, facecolor=back, linewidth=0, zorder=4)
        self._boxes([_box(x, top + _STRIP - part, 0.2, part)], facecolor=color, lw=0, zorder=4)
        self._boxes(whole, facecolor="none", edgecolor=edge, linewidth=lw, zorder=4)
        if name:
            self._ax.text(
                x + 0.1,
                y,
                name,
                size=7,
                weight="bold",
                color=PAPER,
                ha="center",
                va="center",
                zorder=5,
            )


def _box(x: float, y: float, width: float, height: float) -> Box:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
