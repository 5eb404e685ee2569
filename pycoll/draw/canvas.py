"""Shapes on a matplotlib figure: lengths are inches, y grows downward, no global state.

Shapes with one style become one path: a picture has thousands of shapes and dozens of styles, and
matplotlib's time and the size of an SVG grow with the number of paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.draw.style import PAPER, matplotlib_module

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Look:
    z: float
    fill: str
    edge: str
    width: float
    dashed: bool
    alpha: float


class Canvas:
    """Collects shapes; figure() draws them."""

    def __init__(self, width: float, height: float) -> None:
        matplotlib_module()
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(width, height), facecolor=PAPER)
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        self._axes.set_axis_off()
        self._batches: dict[_Look, list[Any]] = {}

    def line(
        self,
        start: Point,
        end: Point,
        color: str,
        width: float,
        *,
        z: float,
        dashed: bool = False,
        alpha: float = 1.0,
    ) -> None:
        """Adds a straight line; its width is in points, like all line widths."""
        from matplotlib.path import Path

        self._add(Path([start, end]), _Look(z, "none", color, width, dashed, alpha))

    def polygon(
        self,
        corners: list[Point],
        *,
        z: float,
        fill: str = "none",
        edge: str = "none",
        line_width: float = 0.0,
    ) -> None:
        from matplotlib.path import Path

        path = Path([*corners, corners[0]], closed=True)
        self._add(path, _Look(z, fill, edge, line_width, False, 1.0))

    def box(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        """Adds a rectangle by its top left corner; nothing when it has no area."""
        if width > 0 and height > 0:
            right, bottom = x + width, y + height
            self.polygon([(x, y), (right, y), (right, bottom), (x, bottom)], **look)

    def circle(
        self,
        center: Point,
        radius: float,
        *,
        z: float,
        fill: str = "none",
        edge: str = "none",
        line_width: float = 0.0,
    ) -> None:
        from matplotlib.path import Path

        path = Path.circle(center, radius)
        self._add(path, _Look(z, fill, edge, line_width, False, 1.0))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        color: str,
        *,
        bold: bool = False,
        align: str = "left",
        z: float = 9,
    ) -> None:
        """Text whose vertical middle is y; `align` is what is at x: left, center or right."""
        self._axes.text(
            x,
            y,
            text,
            size=size,
            color=color,
            weight="bold" if bold else "normal",
            ha=align,
            va="center",
            zorder=z,
            clip_on=False,
        )

    def figure(self) -> Any:
        """The matplotlib Figure with all shapes on it."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        for look, paths in self._batches.items():
            patch = PathPatch(
                Path.make_compound_path(*paths),
                facecolor=look.fill,
                edgecolor=look.edge,
                linewidth=look.width,
                linestyle=(0, (2.2, 1.1)) if look.dashed else "solid",
                alpha=look.alpha if look.alpha < 1 else None,
                capstyle="butt",
                joinstyle="miter",
                zorder=look.z,
                clip_on=False,
            )
            self._axes.add_artist(patch)
        self._batches.clear()
        return self._figure

    def _add(self, path: Any, look: _Look) -> None:
        self._batches.setdefault(look, []).append(path)
