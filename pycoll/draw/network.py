"""Simulations on a cluster as a figure: curves over sizes, and links over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll.cli.units import format_nbytes, format_seconds
from pycoll.draw.style import GRID, INK, MUTED, matplotlib_module
from pycoll.errors import UsageError

# Okabe & Ito's colours, told apart with any colour vision.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
_MARKERS = "os^vDPX*"
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
_MOST_PANELS = 8
_VISIBLE = 0.02  # a line below lies on the axis
_LEGEND = {"fontsize": 8.5, "frameon": False}


def draw_results(results: Sequence[Any], title: str | None) -> Any:
    """See pycoll.draw.draw_network; returns a matplotlib Figure that no global state knows."""
    matplotlib_module()
    from matplotlib.figure import Figure

    curves: dict[str, list[Any]] = {}
    for one in results:
        curves.setdefault(one.algorithm, []).append(one)
    has_curves = any(len(points) > 1 for points in curves.values())
    timed = sorted((one for one in results if one.timeline), key=lambda one: one.time_s)
    timed = timed[:_MOST_PANELS]
    if not has_curves and not timed:
        raise UsageError("nothing to draw: simulate several sizes, or with timeline=True")

    num_rows = (len(timed) + 1) // 2
    heights = ([3.9] if has_curves else []) + [2.0] * num_rows
    if timed:
        heights[has_curves] += 0.3  # the names of the levels
    figure = Figure(figsize=(11, sum(heights) + 0.5), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if has_curves:
        _draw_curves(parts[0], curves)
    levels = list(dict.fromkeys(name for one in timed for name in one.timeline.utilization))
    for row in range(num_rows):
        part = parts[row + has_curves]
        panels = part.subplots(1, 2, sharey=True)
        if row == 0:
            _name_levels(part, levels)
        for column, panel in enumerate(panels):
            at = 2 * row + column
            if at >= len(timed):
                panel.set_axis_off()
                continue
            _draw_links(panel, timed[at], levels, is_left=column == 0)
    if title:
        figure.suptitle(title, color=INK, fontsize=13, fontweight="bold")
    return figure


def _draw_curves(part: Any, curves: dict[str, list[Any]]) -> None:
    left, right = part.subplots(1, 2)
    for i, (name, points) in enumerate(curves.items()):
        look = {
            "label": name,
            "color": _COLORS[i % len(_COLORS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4,
            "linewidth": 1.4,
        }
        sizes = [one.nbytes for one in points]
        left.plot(sizes, [one.time_s for one in points], **look)
        right.plot(sizes, [one.busbw / 1e9 for one in points], **look)
    sizes = sorted({one.nbytes for points in curves.values() for one in points})
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, minor=False)
        panel.xaxis.set_major_formatter(lambda nbytes, _: format_nbytes(nbytes))
        panel.minorticks_off()
        panel.tick_params(axis="x", labelrotation=30)
        panel.set_xlabel("message")
        _tidy(panel)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s))
    left.set_title("time", loc="left", fontsize=10, color=INK)
    right.set_ylim(bottom=0)
    right.set_title("busbw, GB/s", loc="left", fontsize=10, color=INK)
    part.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4, **_LEGEND)


def _name_levels(part: Any, levels: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=color + "30", edgecolor=color, label=f"links into {name} switches")
        for color, name in zip(_COLORS, levels, strict=False)
    ]
    part.legend(handles=handles, loc="outside upper center", ncols=len(levels), **_LEGEND)


def _draw_links(panel: Any, one: Any, levels: list[str], *, is_left: bool) -> None:
    unit, per_s = next((u for u in _UNITS if one.time_s * u[1] >= 1), _UNITS[-1])
    for name, parts in one.timeline.utilization.items():
        color = _COLORS[levels.index(name) % len(_COLORS)]
        edges = [i * one.timeline.bin_s * per_s for i in range(len(parts) + 1)]
        edges[-1] = min(edges[-1], max(one.time_s * per_s, edges[-2]))
        values = [100 * part for part in parts]
        panel.stairs(values, edges, fill=True, color=color, alpha=0.18)
        panel.stairs(values, edges, color=color, linewidth=1.2, label=name)
    worst = one.bottleneck
    about = f"{one.algorithm}, {format_nbytes(one.nbytes)}: {format_seconds(one.time_s)}"
    panel.set_title(about, loc="left", fontsize=9.5, color=INK)
    if worst is not None:
        busiest = f"busiest: {worst.busiest} ({worst.level}), {_percent(worst.busiest_utilization)}"
        at = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
        panel.annotate(busiest, (0, 0), (0, -21), fontsize=8, color=MUTED, **at)
    most = max((part for parts in one.timeline.utilization.values() for part in parts), default=0)
    if most < _VISIBLE:
        note = f"no level's links are more than {_percent(most)} busy: ranks wait for latency"
        panel.text(
            0.5, 0.5, note, transform=panel.transAxes, ha="center", fontsize=8.5, color=MUTED
        )
    panel.set_xlim(0, max(one.time_s * per_s, 1e-12))
    panel.set_ylim(0, 105)
    panel.set_xlabel(unit, fontsize=9, loc="right")
    if is_left:
        panel.set_ylabel("links busy, %", fontsize=9)
    _tidy(panel)


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 or part == 0 else f"{100 * part:.1g} %"


def _tidy(panel: Any) -> None:
    panel.grid(which="major", color=GRID, alpha=0.5, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8.5, colors=MUTED)
