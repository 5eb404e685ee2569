"""A simulation in time: for every rank one lane of sending, one of receiving, one of reducing."""

from __future__ import annotations

from typing import Any

from pycoll.draw.picture import chunk_label
from pycoll.draw.style import GRID, INK, MUTED, PAPER, SHADE, chunk_colors, new_figure

_LANES = ("send", "receive", "reduce")
_LANE = 0.17  # inches
_PITCH = 0.17 * len(_LANES) + 0.16
_LEFT, _RIGHT, _TOP, _BOTTOM = 1.45, 1.55, 1.0, 0.75
_PLOT = 9.0
_MAX_LABELED = 400  # events, beyond which they carry no labels


def draw_timeline(simulation: Any, title: str | None = None) -> Any:
    """Draws a simulation as a matplotlib Figure.

    Args:
        simulation: a pycoll.schedule.Simulation.
        title: replaces `simulated time: 12.3 us`.

    Returns:
        A matplotlib.figure.Figure that no global state knows.
    """
    from matplotlib.collections import PolyCollection

    n = len(simulation.rank_time_s)
    bottom = _TOP + n * _PITCH
    fig, ax = new_figure(_LEFT + _PLOT + _RIGHT, bottom + _BOTTOM)
    unit, per_second = _time_unit(simulation.time_s)
    scale = _PLOT / simulation.time_s if simulation.time_s > 0 else 0.0

    ax.text(
        0.3, 0.36, title or f"simulated time: {simulation.time_s * per_second:.4g} {unit}",
        size=15, weight="bold", color=INK,
    )  # fmt: skip
    ax.text(
        0.3, 0.64, "when each rank sends, receives and reduces; colours and numbers are chunks",
        size=9.5, color=MUTED,
    )  # fmt: skip
    for rank in range(n):
        _frame(ax, simulation, rank, scale)
    _axis(ax, simulation.time_s * per_second, unit, bottom)

    colors = chunk_colors(1 + max((e.chunks[0] for e in simulation.events), default=0))
    boxes, fills = [], []
    for event in simulation.events:
        x0, x1 = (_LEFT + t * scale for t in (event.start_s, event.end_s))
        color = colors[event.chunks[0]]
        for rank, lane in _places(event):
            y = _lane_top(rank, lane)
            boxes.append([(x0, y), (x1, y), (x1, y + _LANE), (x0, y + _LANE)])
            fills.append(color)
            label = chunk_label(event.chunks)
            if len(simulation.events) <= _MAX_LABELED and x1 - x0 > 0.09 * len(label) + 0.05:
                ax.text(
                    (x0 + x1) / 2, y + _LANE / 2, label, size=7, weight="bold", color=PAPER,
                    ha="center", va="center", zorder=4,
                )  # fmt: skip
    ax.add_collection(
        PolyCollection(boxes, facecolors=fills, edgecolors=PAPER, linewidths=0.4, zorder=3)
    )
    return fig


def _places(event: Any) -> list[tuple[int, int]]:
    """The (rank, lane) pairs that an event keeps busy."""
    if event.kind == "reduce":
        return [(event.rank, 2)]
    return [(event.rank, 0), (event.peer, 1)]


def _lane_top(rank: int, lane: int) -> float:
    return _TOP + rank * _PITCH + lane * _LANE


def _frame(ax: Any, simulation: Any, rank: int, scale: float) -> None:
    """Names of the lanes, how long the rank took and what it sent."""
    from matplotlib.patches import Rectangle

    top = _lane_top(rank, 0)
    height = _LANE * len(_LANES)
    ax.add_patch(Rectangle((_LEFT, top), _PLOT, height, fc=SHADE, lw=0, zorder=0))
    ax.text(0.3, top + height / 2, f"rank {rank}", size=10, weight="bold", color=INK, va="center")
    for lane, name in enumerate(_LANES):
        ax.text(
            _LEFT - 0.08, top + (lane + 0.5) * _LANE, name, size=7, color=MUTED, ha="right",
            va="center",
        )  # fmt: skip
    done = _LEFT + simulation.rank_time_s[rank] * scale
    ax.plot([done, done], [top, top + height], color=INK, lw=1.2, zorder=5)
    ax.text(
        _LEFT + _PLOT + 0.1, top + height / 2, f"sends {_bytes(simulation.sent_bytes[rank])}",
        size=8.5, color=MUTED, va="center",
    )  # fmt: skip


def _axis(ax: Any, span: float, unit: str, y: float) -> None:
    from matplotlib.ticker import MaxNLocator

    if span <= 0:
        return
    for tick in MaxNLocator(nbins=10).tick_values(0, span):
        if 0 <= tick <= span * 1.0001:
            x = _LEFT + _PLOT * tick / span
            ax.plot([x, x], [_TOP, y], color=GRID, lw=0.6, zorder=1)
            ax.text(x, y + 0.14, f"{tick:g}", size=8.5, color=MUTED, ha="center", va="center")
    ax.text(_LEFT + _PLOT + 0.2, y + 0.14, unit, size=8.5, color=MUTED, va="center")
    ax.text(_LEFT, y + 0.42, "a black bar ends a rank's work", size=8.5, color=MUTED, va="center")


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
