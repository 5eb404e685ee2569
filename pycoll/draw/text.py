"""The picture as text, for terminals and logs: lifelines down, one row of rails per round or more.

Flows of a round share a row as long as they do not touch. Every lifeline is two characters wide,
so that a rail may end at a rank where the next one starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycoll.draw.picture import FOREIGN, Flow, Picture, chunk_label

_MAX_CELLS = 24  # wider strips become a percentage
_STUB = 5  # characters of a flow that leaves or enters the picture
_LEFT = 10  # the column of the round's name


@dataclass(frozen=True, slots=True)
class _Glyphs:
    lifeline: str
    reduce_line: str
    copy_line: str
    src: str
    reduce_dst: str
    copy_right: str
    copy_left: str
    levels: str | None  # from little to complete; None: digits

    def cell(self, held: int, full: int) -> str:
        if held == FOREIGN:
            return "-"
        if held == 0:
            return "·" if self.levels else "."
        if held >= full:
            return "█" if self.levels else "#"
        if self.levels:
            return self.levels[math.ceil(len(self.levels) * held / full) - 1]
        return str(held) if held < 10 else "+"


_UNICODE = _Glyphs("│", "━", "┄", "●", "⊕", "▷", "◁", "▁▂▃▄▅▆▇")
_ASCII = _Glyphs("|", "=", "-", "o", "+", ">", "<", None)


def draw_text(picture: Picture, *, ascii_only: bool = False) -> str:
    """Draws a picture with box characters, or with plain ASCII.

    Args:
        picture: what to draw.
        ascii_only: use no character outside ASCII.

    Returns:
        Lines of text with a final newline.
    """
    glyphs = _ASCII if ascii_only else _UNICODE
    canvas = _Canvas(picture, glyphs)
    lines = [picture.title, picture.caption, "", canvas.header()]
    lines.append(canvas.strip("start", picture.start))
    for step in picture.rounds:
        rows: list[list[str]] = []
        for flow in step.flows:
            canvas.place(flow, rows)
        for i, row in enumerate(rows):
            name = f"round {step.idx}" if i == 0 else ""
            lines.append(f"{name:<{_LEFT}}{''.join(row)}".rstrip())
        lines.append(canvas.strip("", step.held))
    if not picture.wants_everything and picture.num_chunks <= _MAX_CELLS:
        lines.append(canvas.wanted())
    lines += ["", _legend(picture, glyphs)]
    return "\n".join(lines) + "\n"


class _Canvas:
    """Rows of characters with two columns per rank."""

    def __init__(self, picture: Picture, glyphs: _Glyphs) -> None:
        self._picture = picture
        self._glyphs = glyphs
        cells = picture.num_chunks if picture.num_chunks <= _MAX_CELLS else 4
        self._pitch = max(10, cells + 3)
        self._width = 2 * _STUB + picture.num_ranks * self._pitch

    def _column(self, rank: int) -> int:
        """The left one of the rank's two characters."""
        return _STUB + rank * self._pitch + self._pitch // 2 - 1

    def _centered(self, name: str, texts: list[str]) -> str:
        row = [" "] * self._width
        for rank, text in enumerate(texts):
            first = self._column(rank) + 1 - (len(text) + 1) // 2
            row[first : first + len(text)] = text
        return f"{name:<{_LEFT}}{''.join(row)}".rstrip()

    def header(self) -> str:
        return self._centered("", [f"rank {r}" for r in range(self._picture.num_ranks)])

    def strip(self, name: str, held: tuple[tuple[int, ...], ...]) -> str:
        full = self._picture.full
        if self._picture.num_chunks > _MAX_CELLS:
            rows = zip(held, full, strict=True)
            return self._centered(name, [f"{100 * sum(h) // sum(f)}%" for h, f in rows])
        cell = self._glyphs.cell
        return self._centered(
            name, ["".join(map(cell, *rows)) for rows in zip(held, full, strict=True)]
        )

    def wanted(self) -> str:
        wanted = self._picture.wanted
        return self._centered("", ["".join(" ^"[is_wanted] for is_wanted in row) for row in wanted])

    def place(self, flow: Flow, rows: list[list[str]]) -> None:
        """Writes a flow into the first row where it touches no other one."""
        spans = self._spans(flow)
        free = (" ", self._glyphs.lifeline)
        row = next(
            (r for r in rows if all(ch in free for a, b in spans for ch in r[a : b + 1])), None
        )
        if row is None:
            row = [" "] * self._width
            for rank in range(self._picture.num_ranks):
                row[self._column(rank)] = self._glyphs.lifeline
            rows.append(row)
        for first, last in spans:
            self._line(row, flow, first, last)
        for rank in flow.srcs + flow.dsts:
            self._mark(row, flow, rank)

    def _spans(self, flow: Flow) -> list[tuple[int, int]]:
        """First and last character of each part of a flow."""
        if not flow.shift:
            return [(self._column(flow.first_rank) + 1, self._column(flow.last_rank))]
        return [
            (0, self._column(flow.first_rank)),
            (self._column(flow.last_rank) + 1, self._width - 1),
        ]

    def _line(self, row: list[str], flow: Flow, first: int, last: int) -> None:
        glyph = self._glyphs.reduce_line if flow.kind == "reduce" else self._glyphs.copy_line
        row[first : last + 1] = [glyph] * (last + 1 - first)
        if self._picture.num_chunks == 1:
            return
        # In the middle of the first stretch between two ranks, where no mark can be.
        end = last if flow.shift else min(last, first + self._pitch)
        label = chunk_label(flow.chunks)
        at = (first + end + 1 - len(label)) // 2
        row[at : at + len(label)] = label

    def _mark(self, row: list[str], flow: Flow, rank: int) -> None:
        goes_on_right = rank == flow.first_rank if not flow.shift else rank == flow.last_rank
        at = self._column(rank) + (1 if goes_on_right else 0)
        if rank in flow.srcs:
            row[at] = self._glyphs.src
        elif flow.kind == "reduce":
            row[at] = self._glyphs.reduce_dst
        elif flow.shift:
            row[at] = self._glyphs.copy_right if flow.shift > 0 else self._glyphs.copy_left
        else:
            from_left = rank > flow.srcs[0]
            row[at] = self._glyphs.copy_right if from_left else self._glyphs.copy_left


def _legend(picture: Picture, g: _Glyphs) -> str:
    kinds = {flow.kind for step in picture.rounds for flow in step.flows}
    parts = []
    if "reduce" in kinds:
        parts.append(f"{g.src}{g.reduce_line * 2}{g.reduce_dst} reduce")
    if "copy" in kinds:
        parts.append(f"{g.src}{g.copy_line * 2}{g.copy_right} copy")
    if any(flow.shift for step in picture.rounds for flow in step.flows):
        parts.append("a line that leaves on one side enters on the other")
    if picture.num_chunks <= _MAX_CELLS:
        full = max(map(max, picture.full))
        partial = f"{g.cell(1, full)} 1 of {full} contributions, " if full > 1 else ""
        none, complete = g.cell(0, full), g.cell(full, full)
        asked = "" if picture.wants_everything else ", ^ asked for at the end"
        if any(FOREIGN in row for row in picture.start):
            asked = ", - a value for others" + asked
        parts.append(f"a cell per chunk: {none} nothing yet, {partial}{complete} complete{asked}")
    return "\n".join(parts)
