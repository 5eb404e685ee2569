"""Speed-up by number of ranks beside its law, and what a step's time consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycoll.draw.style import MUTED, deliver_figure, image_format, matplotlib_module

FORMATS = ("svg", "png")
_PARTS = {
    "compute_s": ("computing", "#4c8bd6"),
    "communication_s": ("communication", "#c8463c"),
    "waiting_s": ("waiting", "#e4e4e4"),
}


def draw_scaling(result: dict[str, Any], path: str | Path) -> None:
    """Draws the result of `pycoll scale`.

    Args:
        result: The result as `--json` prints it; bars need rows with the parts of a step.
        path: The file to write; its ending says svg or png.

    Raises:
        UsageError: The ending is another one, or matplotlib is not installed.
    """
    chosen = image_format(path, None, FORMATS)
    deliver_figure(_figure(result), chosen, path)


def _figure(result: dict[str, Any]) -> Any:
    matplotlib_module()
    from matplotlib.figure import Figure

    rows = result["rows"]
    with_parts = all("compute_s" in row for row in rows)
    figure = Figure(figsize=(9.5 if with_parts else 5, 3.6), layout="constrained")
    panels = figure.subplots(1, 2 if with_parts else 1, squeeze=False)[0]
    ranks = [row["ranks"] for row in rows]
    law = "Amdahl" if result["kind"] == "strong" else "Gustafson"
    panels[0].plot(ranks, ranks, ":", color=MUTED, label="ideal")
    label = f"{law}, {result['parallel']:.1%} parallel"
    panels[0].plot(ranks, [row["law"] for row in rows], color=MUTED, label=label)
    speed_up = [row["speed_up"] for row in rows]
    panels[0].plot(ranks, speed_up, "o", color="#4c8bd6", label="measured")
    for axis, scale in ((panels[0].xaxis, "x"), (panels[0].yaxis, "y")):
        getattr(panels[0], f"set_{scale}scale")("log", base=2)
        axis.set_major_formatter("{x:g}")
    panels[0].set_xticks(ranks)
    panels[0].set_xlabel("ranks")
    panels[0].set_ylabel(f"speed-up, {result['kind']} scaling")
    panels[0].legend(frameon=False)
    if with_parts:
        _bars(panels[1], rows)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(panel: Any, rows: list[dict[str, Any]]) -> None:
    names, bottom = [str(row["ranks"]) for row in rows], [0.0] * len(rows)
    for part, (label, color) in _PARTS.items():
        heights = [row[part] * 1e3 for row in rows]
        panel.bar(names, heights, bottom=bottom, color=color, label=label, width=0.6)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    panel.set_xlabel("ranks")
    panel.set_ylabel("ms of a step, mean of all ranks")
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


__all__ = ["FORMATS", "draw_scaling"]
