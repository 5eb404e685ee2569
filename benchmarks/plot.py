"""Draws time against size, one panel per case, from a record of compare.py.

python benchmarks/plot.py benchmarks/results/compare-2026-11-30.json -o compare.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from report import TITLES, Group, Lines, grouped, ordered, shown_libraries, us

from pycoll.bench.plot import format_panel
from pycoll.bench.record import Record
from pycoll.draw.style import image_format, matplotlib_module, render

COLUMNS = 3
# Ours are black; the peers' colours also differ without red and green.
STYLES: dict[str, dict[str, Any]] = {
    "pycoll": {"color": "black", "linewidth": 2.4, "marker": "o", "zorder": 4},
    "pycoll_registered": {"color": "black", "linewidth": 1.4, "marker": "x", "zorder": 4},
    "pycoll_new": {"color": "black", "linewidth": 2, "marker": "s", "ls": ":", "zorder": 4},
    "openmpi": {"color": "#0072b2", "marker": "^"},
    "mpich": {"color": "#56b4e9", "marker": "v"},
    "impi": {"color": "#d55e00", "marker": "D"},
    "gloo": {"color": "#009e73", "marker": "P"},
    "deepspeed": {"color": "#cc79a7", "marker": "X"},
}


def draw_case(panel: Any, group: Group, lines: Lines) -> None:
    """Median times as lines, the floor dashed."""
    sizes = sorted(lines)
    for name in shown_libraries(lines):
        timings = [(b, lines[b].timings[name]) for b in sizes if name in lines[b].timings]
        style = {"linewidth": 1.3, "zorder": 3, "label": TITLES[name]} | STYLES[name]
        medians = [us(timing) for _, timing in timings]
        panel.plot([nbytes for nbytes, _ in timings], medians, markersize=4, **style)
    floors = [(b, lines[b].floor_us()) for b in sizes if lines[b].floor_us()]
    if floors:
        panel.plot(*zip(*floors, strict=True), label="floor", color="grey", ls="--", zorder=2)
    format_panel(panel)
    panel.set_yscale("log")
    panel.set_title(str(group))


def plot(cases: dict[Group, Lines], path: Path) -> None:
    """Draws all cases; the format follows the file name.

    Raises:
        UsageError: matplotlib is not installed, or another ending than .svg or .png.
    """
    picture_format = image_format(path, None, ("svg", "png"))
    matplotlib_module()
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(cases))
    num_rows = -(-len(cases) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.2 * num_rows + 0.6), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False)
    labels: dict[str, Any] = {}
    for panel, group in zip(panels.flat, ordered(cases), strict=False):
        draw_case(panel, group, cases[group])
        handles, names = panel.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    for row in panels:
        row[0].set_ylabel("median us of the slowest rank")
    for panel in panels.flat[len(cases) :]:
        panel.set_axis_off()
    order = [name for name in (*TITLES.values(), "floor") if name in labels]
    lines = [labels[name] for name in order]
    figure.legend(lines, order, loc="outside lower center", ncols=len(order), frameon=False)
    path.write_bytes(render(figure, picture_format))


def main(
    record: Annotated[Path, typer.Argument(help="A JSON file that compare.py wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help=".svg or .png")],
) -> None:
    """Draws the picture of a record."""
    plot(grouped(Record.load(record)), out)


if __name__ == "__main__":
    typer.run(main)
