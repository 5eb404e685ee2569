"""A picture of a plan: for each layout what a step is made of, stacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycoll.draw.style import deliver_figure, image_format, matplotlib_module
from pycoll.parallel.planner.step import Prediction

_COLORS = {"compute": "#4c8bd6", "bubble": "#e4e4e4", "exposed": "#c8463c"}
_MARGIN = 0.1  # of the width, left of the labels
_LABELS = {"compute": "computing", "bubble": "bubble", "exposed": "exposed communication"}


def draw_plan(best: list[Prediction], path: str | Path) -> None:
    """Draws bars of computing, bubble and exposed communication.

    Args:
        best: The layouts, fastest first.
        path: The file to write; its ending says svg or png.

    Raises:
        UsageError: The ending is another one, or matplotlib is not installed.
    """
    chosen = image_format(path, None, ("svg", "png"))
    deliver_figure(_figure(best), chosen, path)


def _figure(best: list[Prediction]) -> Any:
    matplotlib_module()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.4 * len(best)))
    # Labels are text of the viewer's font, which may be a third wider than matplotlib's.
    figure.set_layout_engine("constrained", rect=(_MARGIN, 0, 1 - _MARGIN, 1))
    axes = figure.subplots()
    names, left = [str(of.layout) for of in best], [0.0] * len(best)
    for part, color in _COLORS.items():
        widths = [getattr(of, f"{part}_s") * 1e3 for of in best]
        axes.barh(names, widths, left=left, color=color, label=_LABELS[part], height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_COLORS), frameon=False)
    return figure


__all__ = ["draw_plan"]
