"""Predicted against measured seconds of a training step, for layouts of a GPT on 1 to 8 ranks.

python benchmarks/planning.py --json planning.json --plot planning.svg
python benchmarks/planning.py --compute sleep --real-time
python benchmarks/planning.py --quick

With `sleep`, arithmetic takes the time of a device that is slower than this machine, and ranks
sleep meanwhile (pycoll.parallel.planner.paced), so 8 ranks need no 8 cores; with `real`, ranks
compute, and there are no more of them than cores. Collectives, messages and the optimizer are real
in both. Links are calibrated on as many ranks just before. A layout's time is the least of its
steps, each of which is that of its slowest rank: other processes only add to it. With `real`, the
speed of a core changes within minutes, so it is calibrated before and after each layout, the
prediction is the mean of both, and the time is the median of the steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from trainer_variants import GPT, TP_PLAN, Size

from pycoll import parallel as pc
from pycoll.bench.record import write_results
from pycoll.draw.style import deliver_figure, image_format, matplotlib_module
from pycoll.parallel.planner.calibrate import calibrate
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.layouts import Layout
from pycoll.parallel.planner.paced import Paced
from pycoll.parallel.planner.probe import step_times
from pycoll.parallel.planner.step import Prediction
from pycoll.parallel.planner.trace import without_values
from pycoll.topology import Device, Topology

ARGUMENTS: dict[str, Any] = {"tp": TP_PLAN, "pp": "blocks"}
SLEEP_SIZE = Size(dim=64, blocks=4, vocab=64, samples=16, context=32, heads=8)
REAL_SIZE = Size(dim=256, blocks=4, vocab=1024, samples=16, context=128, heads=8)
QUICK_SIZE = Size(dim=16, blocks=2, vocab=32, samples=4, context=8, heads=2)
RATE = 0.12e9  # operations per second of the device that ranks sleep for
GOAL_MEDIAN, GOAL_WORST, GOAL_CHOICE = 0.10, 0.20, 1.05
EPILOG = """[bold]Examples[/bold]

  python benchmarks/planning.py --json planning.json --plot planning.svg

  python benchmarks/planning.py --compute sleep --real-time

  python benchmarks/planning.py --quick
"""

LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2, microbatches=4),
    Layout(pp=2, microbatches=4, schedule="interleaved_1f1b"),
    Layout(dp=2, microbatches=2, zero=3, recompute="full"),
    Layout(dp=4),
    Layout(tp=4),
    Layout(dp=2, tp=2, zero=1),
    Layout(dp=2, cp=2),
    Layout(pp=4, microbatches=8),
    Layout(dp=2, pp=2, microbatches=4),
    Layout(dp=8),
    Layout(dp=4, tp=2, zero=1),
    Layout(dp=2, tp=4),
    Layout(dp=2, pp=4, microbatches=4),
    Layout(dp=4, pp=2, microbatches=4),
    Layout(dp=2, tp=2, pp=2, microbatches=4),
]
QUICK_LAYOUTS = [Layout(), Layout(dp=2), Layout(tp=2)]


@dataclass(frozen=True, slots=True)
class Row:
    """A layout, its seconds predicted and measured, and how its operators computed."""

    compute: str
    layout: Layout
    predicted_s: float
    measured_s: float
    steps_s: list[float]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


def measure(
    compute: str, size: Size, layouts: list[Layout], steps: int, rate: float = RATE
) -> Iterator[Row]:
    """Predicts and measures layouts; all have the same model and batch.

    Args:
        compute: "sleep" or "real".
        size: The model; `samples` of all replicas.
        layouts: The layouts.
        steps: Timed steps of each.
        rate: Operations per second, for "sleep".
    """
    clusters: dict[int, Topology] = {}
    x = torch.randint(size.vocab, (size.samples, size.context))
    model = GPT(size)
    for layout in layouts:
        if layout.world not in clusters or compute == "real":
            clusters[layout.world] = _cluster(compute, layout.world, rate)
        of = predict(model, x, layout, clusters[layout.world])
        around = {"around": lambda mesh: Paced(rate, mesh)} if compute == "sleep" else {}
        times = step_times(
            model, x, of, y=x, loss=pc.cross_entropy, steps=steps, arguments=ARGUMENTS, **around
        )
        if compute == "real":
            after = predict(model, x, layout, _cluster(compute, layout.world, rate))
            yield Row(compute, layout, (of.seconds + after.seconds) / 2, median(times), times)
        else:
            yield Row(compute, layout, of.seconds, min(times), times)


def predict(model: GPT, x: torch.Tensor, layout: Layout, cluster: Topology) -> Prediction:
    """The prediction of one layout."""
    costs = CostModel(model, x, cluster, y=x, loss=pc.cross_entropy, tp=TP_PLAN, blocks="blocks")
    with without_values():
        return costs.predict(layout)


def _cluster(compute: str, world: int, rate: float) -> Topology:
    found = calibrate(world)
    if compute == "real":
        return found
    # Memory traffic and the start of operators take no time on the device of Paced.
    return replace(found, device=Device(flops_per_s=rate, memory_bytes_per_s=1e18))


def choices(rows: list[Row]) -> dict[tuple[str, int], float]:
    """For each way to compute and number of ranks: measured time of the predicted best / best."""
    found = {}
    for key in dict.fromkeys((row.compute, row.layout.world) for row in rows):
        same = [row for row in rows if (row.compute, row.layout.world) == key]
        chosen = min(same, key=lambda row: row.predicted_s)
        found[key] = chosen.measured_s / min(row.measured_s for row in same)
    return found


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| compute | layout | predicted, ms | measured, ms | error |", "|---|---|---|---|---|"]
    for row in rows:
        ms = f"{row.predicted_s * 1e3:.0f} | {row.measured_s * 1e3:.0f}"
        lines.append(f"| {row.compute} | {row.layout} | {ms} | {row.error:+.1%} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> list[str]:
    """Median and worst error, and what the plan's choice costs, with the goals."""
    lines = []
    for compute in dict.fromkeys(row.compute for row in rows):
        errors = [abs(row.error) for row in rows if row.compute == compute]
        lines.append(
            f"{compute}: {len(errors)} layouts, median error {median(errors):.1%} "
            f"(goal {GOAL_MEDIAN:.0%}), worst {max(errors):.1%} (goal {GOAL_WORST:.0%})"
        )
    for (compute, world), ratio in choices(rows).items():
        lines.append(
            f"{compute}, {world} ranks: the predicted best takes {ratio:.3f} times the measured "
            f"best (goal {GOAL_CHOICE})"
        )
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Predicted against measured time, one point for each layout, with a band of 10 %."""
    matplotlib_module()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    ends = [1e3 * f(row.measured_s for row in rows) for f in (min, max)]
    ends = [ends[0] / 1.5, ends[1] * 1.5]
    axes.plot(ends, ends, color="#888888", linewidth=1)
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#eeeeee")
    styles = {"sleep": ("o", "#0072b2"), "real": ("^", "#d55e00")}
    for compute, (marker, color) in styles.items():
        same = [row for row in rows if row.compute == compute]
        if same:
            axes.scatter(
                [row.measured_s * 1e3 for row in same],
                [row.predicted_s * 1e3 for row in same],
                marker=marker, color=color, s=24, zorder=3,
                label="arithmetic as sleep" if compute == "sleep" else "arithmetic of this machine",
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("ms of a step, measured")
    axes.set_ylabel("ms of a step, predicted (band: 10 %)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    deliver_figure(figure, image_format(path, None, ("svg", "png")), path)


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(epilog=EPILOG)
def main(
    compute: Annotated[str, typer.Option(help="sleep, real, or both with a comma.")] = "sleep,real",
    steps: Annotated[int, typer.Option(help="Timed steps of each layout.", min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="Three layouts of a tiny model.")] = False,
    real_time: Annotated[
        bool,
        typer.Option(help="With sleep: wake ranks before other processes (SCHED_RR; needs root)."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to write: .svg or .png.")] = None,
) -> None:
    """Compare predicted with measured steps of a GPT's layouts; 4 minutes on two cores."""
    kinds = compute.split(",")
    if unknown := set(kinds) - {"sleep", "real"}:
        raise typer.BadParameter(f"compute is {unknown.pop()!r}, expected sleep or real")
    if real_time and kinds != ["sleep"]:
        raise typer.BadParameter("--real-time goes with --compute sleep: others need the cores")
    if real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    rows: list[Row] = []
    for kind in kinds:
        size = QUICK_SIZE if quick else SLEEP_SIZE if kind == "sleep" else REAL_SIZE
        layouts = QUICK_LAYOUTS if quick else LAYOUTS
        if kind == "real":
            layouts = [of for of in layouts if of.world <= (os.cpu_count() or 1)]
        rate = 10 * RATE if quick else RATE
        for row in measure(kind, size, layouts, steps, rate):
            print(f"{row.compute:6} {row.layout!s:32} {row.error:+.1%}", flush=True)
            rows.append(row)
    if json_file is not None:
        write_results(json_file, map(_as_dict, rows), torch=torch.__version__)
    if plot is not None:
        draw(rows, plot)
    print(table(rows))
    print("\n".join(summary(rows)))


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "compute": row.compute,
        "layout": str(row.layout),
        "ranks": row.layout.world,
        "predicted_s": row.predicted_s,
        "measured_s": row.measured_s,
        "steps_s": row.steps_s,
        "error": row.error,
    }


if __name__ == "__main__":
    app()
