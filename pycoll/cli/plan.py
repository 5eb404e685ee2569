"""`pycoll plan` and `pycoll flops`: what a training script costs before it runs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from pycoll.cli.common import ScriptArgument
from pycoll.errors import Error, UsageError

PLAN_EPILOG = """[bold]Examples[/bold]

  pycoll plan train.py --world 8 --memory 16GB

  pycoll plan train.py --world 2 --probe 3

  pycoll plan examples/gpt.py --world 16 --cluster cluster.toml --plot plan.svg
"""
FLOPS_EPILOG = """[bold]Examples[/bold]

  pycoll flops examples/gpt.py

  pycoll flops train.py --batch 8 --cluster examples/topologies/a100_hosts.toml
"""
CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
Cluster = Annotated[
    Path | None, typer.Option(help="TOML file of a cluster with a table \\[device].")
]


def plan(
    command: ScriptArgument,
    world: Annotated[int, typer.Option(help="Number of ranks.", min=1)],
    cluster: Cluster = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a rank, such as 16GB (units of 1000).")
    ] = None,
    search: Annotated[str, typer.Option(help="dp, exhaustive, mcmc or recursive.")] = "dp",
    probe: Annotated[
        int, typer.Option(help="Layouts to run for three steps on this host.", min=0, max=10)
    ] = 0,
    plot: Annotated[Path | None, typer.Option(help="Picture to write: .svg or .png.")] = None,
) -> None:
    """Find the fastest layouts of a script's model that fit, and say why the others lost.

    The script must train with pc.parallelize and model.step. It runs on one rank until its first
    step, which is planned instead of computed. Without a cluster file this machine is calibrated
    first; the plan is then for ranks of one host of that many cores.
    """
    with tempfile.TemporaryDirectory(prefix="pycoll-plan-") as folder:
        where = cluster or _calibrated(world, Path(folder))
        _run(
            command,
            {
                "command": "plan",
                "world": world,
                "cluster": str(where.resolve()),
                "memory": None if memory is None else parse_gigabytes(memory),
                "search": search,
                "probe": probe,
                "plot": None if plot is None else str(plot.resolve()),
            },
        )


def flops(
    command: ScriptArgument,
    cluster: Cluster = None,
    depth: Annotated[int, typer.Option(help="Parts of the names of layers.", min=1)] = 2,
) -> None:
    """Count the operations of a script's model by layer; with a cluster, also estimate seconds.

    The script must train with pc.parallelize and model.step. It runs on one rank until its first
    step.
    """
    where = None if cluster is None else str(cluster.resolve())
    _run(command, {"command": "flops", "cluster": where, "depth": depth})


def parse_gigabytes(text: str) -> int:
    """Parses `16GB`, `512MB` or a number of bytes, in units of 1000 as on datasheets."""
    import re

    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size of memory: expected such as 16GB or 512MB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def _calibrated(world: int, folder: Path) -> Path:
    from dataclasses import replace

    from pycoll.parallel.planner.calibrate import calibrate
    from pycoll.topology import dumps

    typer.echo("pycoll plan: calibrates this machine", err=True)
    measured = calibrate(2)
    path = folder / "machine.toml"
    larger = replace(measured, levels=(replace(measured.levels[0], size=max(world, 2)),))
    path.write_text(dumps(larger), encoding="utf-8")
    return path


def _run(command: list[str], request: dict[str, Any]) -> None:
    from pycoll.launch.processes import World
    from pycoll.launch.script import Launch
    from pycoll.parallel.planner.script import REQUEST

    with tempfile.NamedTemporaryFile(prefix="pycoll-plan-") as done:
        extra = {"PYCOLL_MESH": "dp=1", REQUEST: json.dumps({**request, "done": done.name})}
        if "OMP_NUM_THREADS" not in os.environ:
            extra["OMP_NUM_THREADS"] = "1"
        status = Launch([sys.executable, *command], World(1), extra, False, 5.0).run()
        answered = Path(done.name).stat().st_size > 0
    name = request["command"]
    if status:
        raise Error(f"{name}: the script failed, with status {status}")
    if not answered:
        raise UsageError(
            f"{name}: {command[0]} took no step: expected a script that calls pc.parallelize and "
            "model.step(x, y, loss=...)"
        )
