"""The picture of a training timeline: a row for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycoll.draw.style import render

# Drawing order, from the back; the first match applies.
_COLORS = (
    ("optimizer", "#8e6bbf"),
    ("U", "#8e6bbf"),
    ("F", "#4c8bd6"),
    ("forward", "#4c8bd6"),
    ("W", "#9ccb86"),
    ("", "#5fae57"),  # all other compute is backward
)
_BUBBLE = "#e4e4e4"
_AXES = {  # the first matching axis gives the colour
    "axis tp": "#e0902f", "axis cp": "#2f9e9e", "axis ep": "#c45fa0", "axis dp": "#c8463c",
    "axis pp": "#777777",
}  # fmt: skip


def draw(events: list[dict[str, Any]], target: Path) -> None:
    """Draws the compute, bubbles and collectives of a timeline.

    Args:
        events: Trace events, as `pc.trace` records them.
        target: The file to write, .svg or .png.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = {(e["pid"], e["name"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    labels = {pid: text for (pid, what, _), text in names.items() if what == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    figure = Figure(figsize=(11, 0.8 + 0.55 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for row, pid in enumerate(sorted(labels)):
        mine = [event for event in spans if event["pid"] == pid]
        for cat, color, base, height in (
            ("bubble", _BUBBLE, -0.1, 0.5),
            ("compute", None, -0.1, 0.5),
            *(
                (axis, color, -0.35 + 0.05 * i, 0.045)
                for i, (axis, color) in enumerate(_AXES.items())
            ),
        ):
            chosen = [event for event in mine if event["cat"].split("+")[0] == cat]
            axes.broken_barh(
                [(event["ts"] / 1e3, max(event["dur"] / 1e3, 0.002)) for event in chosen],
                (row + base, height),
                facecolors=[color or _color(event) for event in chosen],
                edgecolors="white" if cat == "compute" else "none",
                linewidth=0.4,
            )
    axes.set_yticks(range(len(labels)), [labels[pid] for pid in sorted(labels)])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    drawn = {event["cat"].split("+")[0] for event in spans}
    legend = {"forward": "#4c8bd6", "backward": "#5fae57", "optimizer": "#8e6bbf"}
    legend |= {"bubble": _BUBBLE} if "bubble" in drawn else {}
    for axis, color in _AXES.items():
        if axis in drawn:
            legend[axis.removeprefix("axis ") + " collectives"] = color
    axes.legend(
        handles=[Patch(color=color, label=label) for label, color in legend.items()],
        loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=len(legend), frameon=False,
        fontsize=8,
    )  # fmt: skip
    target.write_bytes(render(figure, target.suffix.lstrip(".")))


def _color(event: dict[str, Any]) -> str:
    name = event["name"].lstrip("0123456789")  # actions of a pipeline begin with their stage
    return next(color for start, color in _COLORS if name.startswith(start))


__all__ = ["draw"]
