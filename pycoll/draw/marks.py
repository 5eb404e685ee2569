"""The marks of a flow: its lines, where it starts, and what it does where it ends."""

from __future__ import annotations

from pycoll.draw.canvas import Canvas, Point
from pycoll.draw.style import PAPER

HEAD = 0.062  # inches: half the size of the mark at a flow's end
_RIBBON = 9.5  # points: widest flow


def draw_ribbon(
    canvas: Canvas, start: Point, end: Point, colors: list[str], kind: str, halo: float
) -> None:
    """A flow's parallel lines: solid when it reduces, dashed when it copies."""
    width = min(1.9, _RIBBON / len(colors))
    (x0, y0), (x1, y1) = start, end
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
    # Lines are ordered left to right as the cells are, whichever way the flow goes.
    nx, ny = (y1 - y0) / length, -(x1 - x0) / length
    if nx < 0:
        nx, ny = -nx, -ny
    if halo:
        canvas.line(start, end, PAPER, width * len(colors) + halo, z=2)
    for i, color in enumerate(colors):
        off = (i - (len(colors) - 1) / 2) * width / 72
        dx, dy = off * nx, off * ny
        canvas.line(
            (x0 + dx, y0 + dy), (x1 + dx, y1 + dy), color, width, dashed=kind == "copy", z=3
        )


def draw_source(canvas: Canvas, at: Point, color: str) -> None:
    """The mark where a flow starts."""
    canvas.circle(at, 0.032, fill=color, z=4)


def draw_head(
    canvas: Canvas, start: Point, end: Point, color: str, kind: str, size: float = HEAD
) -> None:
    """A circled plus where values are combined, a hollow arrowhead where they are replaced."""
    x, y = end
    if kind == "reduce":
        arm = 0.6 * size
        canvas.circle(end, size, fill=PAPER, edge=color, line_width=1.2, z=5)
        canvas.line((x - arm, y), (x + arm, y), color, 1.2, z=5.2)
        canvas.line((x, y - arm), (x, y + arm), color, 1.2, z=5.2)
        return
    dx, dy = x - start[0], y - start[1]
    scale = 2.2 * size / max((dx * dx + dy * dy) ** 0.5, 1e-9)
    dx, dy = dx * scale, dy * scale
    tip = x + 0.2 * dx, y + 0.2 * dy
    base = tip[0] - dx, tip[1] - dy
    left = base[0] - 0.42 * dy, base[1] + 0.42 * dx
    right = base[0] + 0.42 * dy, base[1] - 0.42 * dx
    canvas.polygon([tip, left, right], fill=PAPER, edge=color, line_width=1.2, z=5)
