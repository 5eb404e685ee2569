"""A simulation in time: for every rank one lane of sending, one of receiving, one of reducing."""

from __future__ import annotations

from typing import Any

from pycoll.draw.canvas import Canvas
from pycoll.draw.picture import chunk_label
from pycoll.draw.style import GRID, INK, MARGIN, MUTED, PAPER, SHADE, chunk_colors, ink_on, ticks

_LANES = ("send", "receive", "reduce")
_LANE = 0.17  # inches
_PITCH = 0.17 * len(_LANES) + 0.16
_LEFT, _RIGHT, _TOP, _BOTTOM = 1.45, 1.55, 1.0, 0.75
_PLOT = 9.0
_MAX_LABELED = 600  # events, beyond which they carry no labels


def draw_timeline(simulation: Any, title: str | None = None) -> Any:
    """Draws a simulation as a matplotlib Figure.

    Args:
        simulation: a pycoll.schedule.Simulation.
        title: replaces `simulated time: 12.3 us`.

    Returns:
        A matplotlib.figure.Figure that no global state knows.
    """
    n = len(simulation.rank_time_s)
    bottom = _TOP + n * _PITCH
    canvas = Canvas(_LEFT + _PLOT + _RIGHT, bottom + _BOTTOM)
    unit, per_second = _time_unit(simulation.time_s)
    scale = _PLOT / simulation.time_s if simulation.time_s > 0 else 0.0

    title = title or f"simulated time: {simulation.time_s * per_second:.4g} {unit}"
    caption = "when each rank sends, receives and reduces; colours and numbers are chunks"
    canvas.text(MARGIN, 0.32, title, 15, INK, bold=True)
    canvas.text(MARGIN, 0.62, caption, 9.5, MUTED)
    for rank in range(n):
        _frame(canvas, simulation, rank, scale)
    _axis(canvas, simulation.time_s * per_second, unit, bottom)

    colors = chunk_colors(1 + max((e.chunks[0] for e in simulation.events), default=0))
    labeled = len(simulation.events) <= _MAX_LABELED
    for event in simulation.events:
        x, width = _LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
        color = colors[event.chunks[0]]
        label = chunk_label(event.chunks)
        for rank, lane in _places(event):
            y = _lane_top(rank, lane)
            canvas.box(x, y, width, _LANE, fill=color, edge=PAPER, line_width=0.4, z=3)
            if labeled and width > 0.09 * len(label) + 0.05:
                middle = x + width / 2, y + _LANE / 2
                canvas.text(*middle, label, 7, ink_on(color), bold=True, align="center")
    return canvas.figure()


def _places(event: Any) -> list[tuple[int, int]]:
    """The (rank, lane) pairs that an event keeps busy."""
    if event.kind == "reduce":
        return [(event.rank, 2)]
    return [(event.rank, 0), (event.peer, 1)]


def _lane_top(rank: int, lane: int) -> float:
    return _TOP + rank * _PITCH + lane * _LANE


def _frame(canvas: Canvas, simulation: Any, rank: int, scale: float) -> None:
    """Names of the lanes, how long the rank took and what it sent."""
    top = _lane_top(rank, 0)
    height = _LANE * len(_LANES)
    canvas.box(_LEFT, top, _PLOT, height, fill=SHADE, z=0)
    canvas.text(MARGIN, top + height / 2, f"rank {rank}", 10, INK, bold=True)
    for lane, name in enumerate(_LANES):
        y = top + (lane + 0.5) * _LANE
        canvas.text(_LEFT - 0.08, y, name, 7, MUTED, align="right")
    done = _LEFT + simulation.rank_time_s[rank] * scale
    canvas.line((done, top), (done, top + height), INK, 1.2, z=5)
    sent = f"sends {_bytes(simulation.sent_bytes[rank])}"
    canvas.text(_LEFT + _PLOT + 0.1, top + height / 2, sent, 8.5, MUTED)


def _axis(canvas: Canvas, span: float, unit: str, y: float) -> None:
    if span <= 0:
        return
    for tick in ticks(span, 10):
        x = _LEFT + _PLOT * tick / span
        canvas.line((x, _TOP), (x, y), GRID, 0.6, z=1)
        canvas.text(x, y + 0.14, f"{tick:g}", 8.5, MUTED, align="center")
    canvas.text(_LEFT + _PLOT + 0.2, y + 0.14, unit, 8.5, MUTED)
    canvas.text(_LEFT, y + 0.42, "a black bar ends a rank's work", 8.5, MUTED)


def _time_unit(time_s: float) -> tuple[str, float]:
    for unit, per_second in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time_s * per_second >= 1:
            return unit, per_second
    return "ns", 1e9


def _bytes(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"
