"""`pycoll scale`: measures the speed-up of a training script with more ranks."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import check_script, console, new_table
from pycoll.errors import Error, UsageError

if TYPE_CHECKING:
    from pycoll.parallel.tools.scaling_report import Times
    from pycoll.parallel.tools.step_parts import StepParts

EPILOG = """[bold]Examples[/bold]

  pycoll scale -n 1,2,4 train.py --plot scale.svg

  pycoll scale --strong -n 1,2 --axis tp train.py --batch 8

  pycoll scale --weak -n 1,2,4 train.py --batch {8n}

  pycoll scale -n 1,2 --updates 2000 --flops 3e12 train.py

  pycoll scale --times 1:2592000,1472:2820 --price 0.001 --deadline 3600
"""

CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
_SKIPPED = 2  # first steps, which allocate memory
_SIZE = re.compile(r"\{(\d*)n\}")  # {8n} in the script's arguments


def scale(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The script and its arguments; {8n} in one is 8 times the number of ranks.",
        ),
    ] = None,
    n: Annotated[str, typer.Option("-n", help="Numbers of ranks, including 1.")] = "1,2",
    axis: Annotated[str, typer.Option(help="The axis that grows: dp, ep, cp, tp or pp.")] = "dp",
    steps: Annotated[int, typer.Option(help="Timed steps of each run.", min=3)] = 10,
    strong: Annotated[
        bool | None,
        typer.Option(
            "--strong/--weak",
            help="Whether the batch of all ranks is constant, or that of each rank. Default: as "
            "the script's tokens say.",
        ),
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(help="Known seconds by ranks, in place of a script: 1:2592000,1472:2820."),
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option(help="Steps until the target accuracy: adds the time to it.", min=1),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="Operations of a step of one rank's batch: adds petaflop/s-days."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a rank for a second: what a step costs.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="With --price: seconds that a step may take.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture of the law and of what a step consists of: .svg or .png."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Time a script's steps on several numbers of ranks, and fit a scaling law.

    The script must train with pycoll.parallel. If its batch size is constant (strong scaling), the
    command fits Amdahl's law; if it grows with the ranks (weak scaling), Gustafson's law. With
    --weak one rank also runs the step of each number of ranks, and the speed-up is that of the two
    times; otherwise one rank is taken to need n times as long for n times the batch. The serial
    share is that of Karp and Flatt, measured on so many ranks.

    A step's time is the mean of all ranks: computing, communication that the last rank has as
    well, and waiting for later ranks or stages.
    """
    if (command is None) == (times is None):
        raise UsageError("scale: expected either a script or --times")
    if deadline is not None and price is None:
        raise UsageError("scale: --deadline needs --price")
    if plot is not None:
        from pycoll.draw.scaling import FORMATS
        from pycoll.draw.style import image_format

        image_format(plot, None, FORMATS)  # before the ranks start
    if times is not None:
        found = _known_times(times)
    else:
        found = _run_all(check_script(command or []), n, axis, steps, strong is False)
    from pycoll.parallel.tools.scaling_report import report

    result = report(found, strong)
    if updates is not None or flops is not None:
        _add_totals(result, updates or 1, flops)
    if price is not None:
        result["cheapest"] = _cheapest(found, price, deadline)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(result)
    if plot is not None:
        from pycoll.draw.scaling import draw_scaling

        draw_scaling(result, plot)
        typer.echo(f"wrote {plot}", err=True)


def _known_times(text: str) -> Times:
    """Parses `1:43200,1472:47`."""
    from pycoll.parallel.tools.scaling_report import Times
    from pycoll.parallel.tools.step_parts import StepParts

    try:
        pairs = (part.split(":") for part in text.split(","))
        found = {int(n): float(seconds) for n, seconds in pairs}
    except ValueError:
        raise UsageError(f"--times {text}: expected such as 1:43200,1472:47") from None
    if any(n < 1 or not seconds > 0 for n, seconds in found.items()):
        raise UsageError(f"--times {text}: expected ranks from 1 on, and seconds above 0")
    return Times({n: StepParts(seconds, 0, seconds, 0.0, 0.0) for n, seconds in found.items()})


def _cheapest(found: Times, price: float, deadline_s: float | None) -> dict[str, float]:
    from pycoll.parallel.tools import scaling_laws

    times = {n: step.seconds for n, step in found.steps.items()}
    limit = float("inf") if deadline_s is None else deadline_s
    ranks, cost = scaling_laws.cheapest(times, price, limit)
    return {"ranks": ranks, "price": cost}


def _add_totals(result: dict[str, Any], updates: int, flops: float | None) -> None:
    """Time and operations of all steps, by number of ranks."""
    from pycoll.parallel.tools.scaling_laws import petaflop_s_days

    result["updates"] = updates
    for row in result["rows"]:
        row["all_s"] = row["seconds"] * updates
        if flops is not None:
            done = flops * updates * (row["ranks"] if result["kind"] == "weak" else 1)
            row["petaflop_s_days"] = petaflop_s_days(done)
            row["flop_per_s"] = done / row["all_s"]


def _run_all(command: list[str], n: str, axis: str, steps: int, weak: bool) -> Times:
    from pycoll.parallel.tools.scaling_report import Times

    try:
        ranks = sorted({int(part) for part in n.split(",")})
    except ValueError:
        raise UsageError(f"-n {n}: expected numbers such as 1,2,4") from None
    if ranks[0] != 1 or len(ranks) < 2:
        raise UsageError(f"-n {n}: expected 1 and at least one more number of ranks")
    if weak and not any(_SIZE.search(word) for word in command):
        raise UsageError(
            "scale: --weak needs a size of the script that grows with the ranks, such as "
            "--batch {8n}"
        )

    def run(count: int, size: int) -> StepParts:
        sized = [_SIZE.sub(lambda of: str(int(of[1] or 1) * size), word) for word in command]
        return _times(sized, count, axis, steps)

    found = {count: run(count, count) for count in ranks}
    if not weak:
        return Times(found)
    return Times(found, {size: (run(1, size) if size > 1 else found[1]).seconds for size in ranks})


def _show(result: dict[str, Any]) -> None:
    titles = ["ranks", "ms/step", "tokens/step", "speed-up", "law", "efficiency", "serial share"]
    with_parts = all("compute_s" in row for row in result["rows"])
    titles += ["computing ms", "communication", "waiting"] if with_parts else []
    table = new_table(*titles)
    for row in result["rows"]:
        cells = [
            str(row["ranks"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['tokens']:,}" if row["tokens"] else "",
            f"{row['speed_up']:.2f}",
            f"{row['law']:.2f}",
            f"{row['efficiency']:.1%}",
            "" if row["serial"] is None else f"{row['serial']:.2g}",
        ]
        parts = ("compute_s", "communication_s", "waiting_s") if with_parts else ()
        table.add_row(*cells, *(f"{row[part] * 1e3:.1f}" for part in parts))
    console().print(table)
    if result["parallel"] > 0:
        what = f"{result['parallel']:.2%} of the time is parallel"
    else:
        what = "more ranks are slower, so no law fits"
    typer.echo(f"{result['kind']} scaling: {what}")
    for row in result["rows"] if "updates" in result else []:
        text = f"{row['ranks']} ranks: {result['updates']:,} steps in {row['all_s']:,.1f} s"
        if "flop_per_s" in row:
            text += f", {row['petaflop_s_days']:.3g} petaflop/s-days, {row['flop_per_s']:.3g}/s"
        typer.echo(text)
    if "cheapest" in result:
        best = result["cheapest"]
        typer.echo(f"cheapest in time: {best['ranks']} ranks, {best['price']:.4g} for a step")


def _times(command: list[str], n: int, axis: str, steps: int) -> StepParts:
    """The step of median duration."""
    from pycoll.launch.processes import World
    from pycoll.launch.script import Launch
    from pycoll.parallel.tools import step_parts
    from pycoll.parallel.tools.check_hooks import TIMES

    with tempfile.TemporaryDirectory(prefix="pycoll-scale-") as folder:
        path = Path(folder) / "times"
        extra = {"PYCOLL_MESH": f"{axis}={n}", TIMES: f"{steps + _SKIPPED}:{path}"}
        if "OMP_NUM_THREADS" not in os.environ:
            extra["OMP_NUM_THREADS"] = "1"
        typer.echo(f"pycoll scale: {axis}={n} {' '.join(command)}", err=True)
        status = Launch([sys.executable, *command], World(n), extra, True, 5.0).run()
        timed = step_parts.read(path, n, _SKIPPED)
    if status:
        raise Error(f"scale: the script failed on {n} ranks, with status {status}")
    if not timed:
        raise UsageError(
            f"scale: {command[0]} took {_SKIPPED} steps of pc.optimizer or fewer on {n} ranks, "
            f"expected {steps + _SKIPPED} or more"
        )
    return step_parts.median(timed)
