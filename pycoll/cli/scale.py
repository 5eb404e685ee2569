"""`pycoll scale`: measures the speed-up of a training script with more ranks."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from pycoll.cli.common import console, new_table
from pycoll.errors import Error, UsageError

EPILOG = """[bold]Examples[/bold]

  pycoll scale -n 1,2,4 train.py

  pycoll scale -n 1,2 --axis tp train.py --batch 8

  pycoll scale --times 1:2592000,1472:2820 --price 0.001 --deadline 3600
"""

CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
_SKIPPED = 2  # first steps, which allocate memory


def scale(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments."),
    ] = None,
    n: Annotated[str, typer.Option("-n", help="Numbers of ranks, including 1.")] = "1,2",
    axis: Annotated[str, typer.Option(help="The axis that grows: dp, ep, cp, tp or pp.")] = "dp",
    steps: Annotated[int, typer.Option(help="Timed steps of each run.", min=3)] = 10,
    times: Annotated[
        str | None,
        typer.Option(help="Known seconds by ranks, in place of a script: 1:2592000,1472:2820."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a rank for a second: what a step costs.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="With --price: seconds that a step may take.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Time a script's steps on several numbers of ranks, and fit a scaling law.

    The script must train with pycoll.parallel. If its batch size is constant (strong scaling), the
    command fits Amdahl's law; if it grows with the ranks (weak scaling), Gustafson's law. The
    serial share is that of Karp and Flatt, measured on so many ranks.
    """
    if (command is None) == (times is None):
        raise UsageError("scale: expected either a script or --times")
    if deadline is not None and price is None:
        raise UsageError("scale: --deadline needs --price")
    if times is not None:
        found = {count: (seconds, 0) for count, seconds in _known_times(times).items()}
    else:
        found = _run_all(command or [], n, axis, steps)
    result = report(found)
    if price is not None:
        result["cheapest"] = _cheapest(found, price, deadline)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    _show(result)


def _known_times(text: str) -> dict[int, float]:
    """Parses `1:43200,1472:47`."""
    try:
        pairs = (part.split(":") for part in text.split(","))
        found = {int(n): float(seconds) for n, seconds in pairs}
    except ValueError:
        raise UsageError(f"--times {text}: expected such as 1:43200,1472:47") from None
    if any(n < 1 or not seconds > 0 for n, seconds in found.items()):
        raise UsageError(f"--times {text}: expected ranks from 1 on, and seconds above 0")
    return found


def _cheapest(
    found: dict[int, tuple[float, int]], price: float, deadline_s: float | None
) -> dict[str, float]:
    from pycoll.parallel.tools import scaling_laws

    times = {n: seconds for n, (seconds, _) in found.items()}
    limit = float("inf") if deadline_s is None else deadline_s
    ranks, cost = scaling_laws.cheapest(times, price, limit)
    return {"ranks": ranks, "price": cost}


def _run_all(command: list[str], n: str, axis: str, steps: int) -> dict[int, tuple[float, int]]:
    try:
        ranks = sorted({int(part) for part in n.split(",")})
    except ValueError:
        raise UsageError(f"-n {n}: expected numbers such as 1,2,4") from None
    if ranks[0] != 1 or len(ranks) < 2:
        raise UsageError(f"-n {n}: expected 1 and at least one more number of ranks")
    return {count: _times(command, count, axis, steps) for count in ranks}


def _show(result: dict[str, Any]) -> None:
    titles = ("ranks", "ms/step", "tokens/step", "speed-up", "law", "efficiency", "serial share")
    table = new_table(*titles)
    for row in result["rows"]:
        table.add_row(
            str(row["ranks"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['tokens']:,}" if row["tokens"] else "",
            f"{row['speed_up']:.2f}",
            f"{row['law']:.2f}",
            f"{row['efficiency']:.1%}",
            "" if row["serial"] is None else f"{row['serial']:.2g}",
        )
    console().print(table)
    if result["parallel"] > 0:
        what = f"{result['parallel']:.2%} of the time is parallel"
    else:
        what = "more ranks are slower, so no law fits"
    typer.echo(f"{result['kind']} scaling: {what}")
    if "cheapest" in result:
        best = result["cheapest"]
        typer.echo(f"cheapest in time: {best['ranks']} ranks, {best['price']:.4g} for a step")


def report(found: dict[int, tuple[float, int]]) -> dict[str, Any]:
    """Fits a scaling law to a step's seconds and tokens by number of ranks.

    Raises:
        UsageError: The batch is neither constant nor proportional to the ranks.
    """
    from pycoll.parallel.tools import scaling_laws

    times = {n: seconds for n, (seconds, _) in found.items()}
    tokens = {n: count for n, (_, count) in found.items()}
    if len(set(tokens.values())) == 1:
        kind, fit = "strong", scaling_laws.fit_amdahl(times)
    elif all(count == n * tokens[1] for n, count in tokens.items()):
        # One rank takes n times as long for n times the batch.
        kind, fit = "weak", scaling_laws.fit_gustafson(times, {n: n * times[1] for n in times})
    else:
        raise UsageError(
            f"scale: tokens of a step are {tokens}: expected a constant number, or one "
            "proportional to n"
        )
    rows = [
        {
            "ranks": n,
            "seconds": times[n],
            "tokens": tokens[n],
            "speed_up": fit.speed_up[n],
            "law": fit.law[n],
            "efficiency": fit.efficiency[n],
            "serial": scaling_laws.karp_flatt(fit.speed_up[n], n) if n > 1 else None,
        }
        for n in times
    ]
    return {"kind": kind, "parallel": fit.parallel, "rows": rows}


def _times(command: list[str], n: int, axis: str, steps: int) -> tuple[float, int]:
    """Median seconds of a step, and its tokens."""
    from pycoll.launch.processes import World
    from pycoll.launch.script import Launch
    from pycoll.parallel.tools.check_hooks import TIMES

    with tempfile.TemporaryDirectory(prefix="pycoll-scale-") as folder:
        path = Path(folder) / "times"
        extra = {"PYCOLL_MESH": f"{axis}={n}", TIMES: f"{steps + _SKIPPED}:{path}"}
        if "OMP_NUM_THREADS" not in os.environ:
            extra["OMP_NUM_THREADS"] = "1"
        typer.echo(f"pycoll scale: {axis}={n}", err=True)
        status = Launch([sys.executable, *command], World(n), extra, True, 5.0).run()
        if status or not path.exists():
            raise Error(f"scale: the script failed on {n} ranks, with status {status}")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    if len(lines) <= _SKIPPED:
        raise UsageError(f"scale: {command[0]} took {len(lines)} steps, expected {steps} or more")
    timed = lines[_SKIPPED:]
    return statistics.median(line["seconds"] for line in timed), timed[0]["tokens"]
