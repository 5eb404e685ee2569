"""Draws time against size, one panel per case, from a record of compare.py.

python benchmarks/plot.py benchmarks/results/compare-2026-11-21.json -o docs/images/compare.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from report import TITLES, Group, Lines, grouped, ordered, shown_libraries, us

from pycoll.bench.record import Record
from pycoll.cli.units import format_nbytes

COLUMNS = 3
# Ours are black; the peers' colours also differ without red and green.
STYLES: dict[str, dict[str, Any]] = {
    "pycoll": {"color": "black", "linewidth": 2.4, "marker": "o", "zorder": 4},
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
    floors = [(b, lines[b].floor_us) for b in sizes if lines[b].floor_us]
    if floors:
        panel.plot(*zip(*floors, strict=True), label="floor", color="grey", ls="--", zorder=2)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(str(group))
    panel.set_xticks([4**k for k in range(1, 15) if k % 2 == 1 and 4**k <= max(sizes) * 2])
    panel.xaxis.set_major_formatter(lambda nbytes, _: format_nbytes(int(nbytes)))
    panel.tick_params(axis="x", labelrotation=35)
    panel.grid(alpha=0.3)


def plot(cases: dict[Group, Lines], path: Path) -> None:
    """Draws all cases; the format follows the file name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pycoll"  # equal pictures are equal files
    from matplotlib import pyplot

    columns = min(COLUMNS, len(cases))
    num_rows = -(-len(cases) // columns)
    figure, panels = pyplot.subplots(
        num_rows, columns, figsize=(5.2 * columns, 4.2 * num_rows + 0.6), squeeze=False
    )
    for panel, group in zip(panels.flat, ordered(cases), strict=False):
        draw_case(panel, group, cases[group])
    for row in panels:
        row[0].set_ylabel("median us of the slowest rank")
    spare = panels.flat[len(cases) :]
    for panel in spare:
        panel.set_axis_off()
    labels: dict[str, Any] = {}
    for panel in panels.flat:
        labels |= {
            label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
    order = [name for name in (*TITLES.values(), "floor") if name in labels]
    handles = [labels[name] for name in order]
    if len(spare):
        spare[0].legend(handles, order, loc="center", fontsize=12, frameon=False)
    else:
        panels.flat[0].legend(handles, order, loc="upper left", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(
    record: Annotated[Path, typer.Argument(help="A JSON file that compare.py wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help=".svg or .png")],
) -> None:
    """Draws the picture of a record."""
    plot(grouped(Record.load(record)), out)


if __name__ == "__main__":
    typer.run(main)
