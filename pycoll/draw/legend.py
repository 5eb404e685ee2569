"""Legend of a figure: chunks, kinds of flow, and how full a cell is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pycoll.draw.canvas import Canvas
from pycoll.draw.marks import draw_head, draw_ribbon, draw_source
from pycoll.draw.picture import FOREIGN, Picture
from pycoll.draw.style import CELL_HEIGHT, INK, MARGIN, MUTED, ink_on, tint

_ROW = 0.36
_CHARACTER = 0.065  # of a note, on average
_BETWEEN = 0.25
_SWATCH = 0.20
_MAX_CHUNKS = 16  # more are not listed
_NOTES = {
    "reduce": "reduce: combined with what is there",
    "copy": "copy: replaces what is there",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    width: float  # of the sign
    note: str
    draw: Callable[[Canvas, float, float], None]  # the sign, from its left end and middle

    @property
    def whole(self) -> float:
        return self.width + _CHARACTER * len(self.note) + _BETWEEN


class Legend:
    """Rows of entries that fit the width of the figure."""

    def __init__(self, picture: Picture, colors: list[str], width: float) -> None:
        self._colors = colors
        self._rows: list[list[_Entry]] = [[]]
        room = width - 2 * MARGIN
        for entry in self._entries(picture):
            if self._rows[-1] and sum(e.whole for e in self._rows[-1]) + entry.whole > room:
                self._rows.append([])
            self._rows[-1].append(entry)
        self.height = _ROW * len(self._rows) + 0.45

    def draw(self, canvas: Canvas, top: float) -> None:
        for i, row in enumerate(self._rows):
            x, y = MARGIN + 0.1, top + 0.36 + i * _ROW
            for entry in row:
                entry.draw(canvas, x, y)
                canvas.text(x + entry.width, y, entry.note, 8.5, MUTED)
                x += entry.whole

    def _entries(self, picture: Picture) -> list[_Entry]:
        entries = []
        if 1 < picture.num_chunks <= _MAX_CHUNKS:
            pitch = _SWATCH + 0.04
            entries.append(_Entry(pitch * picture.num_chunks + 0.04, "chunk", self._chunks))
        kinds = {flow.kind for step in picture.rounds for flow in step.flows}
        entries += [_Entry(0.58, _NOTES[k], self._flow(k)) for k in _NOTES if k in kinds]
        full = max(map(max, picture.full))
        if full > 1:
            note = f"1 of {full} contributions"
            entries.append(_Entry(0.28, note, self._cell(1 / full)))
        entries.append(_Entry(0.28, "complete", self._cell(1.0)))
        if any(FOREIGN in row for row in picture.start):
            entries.append(_Entry(0.28, "a value for others", self._cell(0.0)))
        if kinds:
            entries.append(_Entry(0.28, "written in this round", self._written))
        if not picture.wants_everything:
            entries.append(_Entry(0.28, "asked for at the end", self._wanted))
        return entries

    def _chunks(self, canvas: Canvas, x: float, y: float) -> None:
        for chunk, color in enumerate(self._colors):
            left = x + (_SWATCH + 0.04) * chunk
            canvas.box(left, y - CELL_HEIGHT / 2, _SWATCH, CELL_HEIGHT, fill=color, z=3)
            canvas.text(
                left + _SWATCH / 2, y, str(chunk), 7, ink_on(color), bold=True, align="center"
            )

    def _flow(self, kind: str) -> Callable[[Canvas, float, float], None]:
        def draw(canvas: Canvas, x: float, y: float) -> None:
            start, end, color = (x, y), (x + 0.42, y), self._colors[0]
            draw_ribbon(canvas, start, end, [color], kind, halo=0.0)
            draw_source(canvas, start, color)
            draw_head(canvas, start, end, color, kind)

        return draw

    def _cell(self, filled: float) -> Callable[[Canvas, float, float], None]:
        def draw(canvas: Canvas, x: float, y: float) -> None:
            top, part = y - CELL_HEIGHT / 2, CELL_HEIGHT * filled
            canvas.box(x, top, _SWATCH, CELL_HEIGHT, fill=tint(self._colors[0]), z=3)
            canvas.box(x, top + CELL_HEIGHT - part, _SWATCH, part, fill=self._colors[0], z=4)
            canvas.box(x, top, _SWATCH, CELL_HEIGHT, edge=MUTED, line_width=0.5, z=5)

        return draw

    def _wanted(self, canvas: Canvas, x: float, y: float) -> None:
        canvas.box(x, y - 0.02, _SWATCH, 0.045, fill=INK, z=5)

    def _written(self, canvas: Canvas, x: float, y: float) -> None:
        canvas.box(x, y - CELL_HEIGHT / 2, _SWATCH, CELL_HEIGHT, edge=INK, line_width=1.5, z=5)
