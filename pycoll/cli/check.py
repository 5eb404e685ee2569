"""`pycoll check`: compares a script's results on a mesh with those of one process."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import FAILED, ScriptArgument
from pycoll.errors import Error, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

EPILOG = """[bold]Examples[/bold]

  pycoll check --mesh dp=2,tp=2,pp=2 train.py

  pycoll check --mesh tp=4 train.py --batch 8
"""

CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}


def check(
    command: ScriptArgument,
    mesh: Annotated[str, typer.Option(help="The mesh, such as dp=2,tp=2,pp=2.")],
    tolerance: Annotated[
        float, typer.Option(help="Largest allowed difference of a loss or an element.")
    ] = 1e-10,
    timeout: Annotated[float, typer.Option(help="Timeout of a collective, in seconds.")] = 60.0,
) -> None:
    """Run 3 steps of a script in float64, on one process and on a mesh, and compare them.

    The script must train with pycoll.parallel. The command shows the first tensor that differs, in
    the order of computation: outputs of layers, losses, gradients from the last layer to the first,
    weights.
    """
    import math

    from pycoll.parallel.core.mesh_sizes import infer_sizes, parse_sizes

    sizes = parse_sizes(mesh)
    num_ranks = math.prod(infer_sizes(sizes, math.prod(sizes.values())).values())
    with tempfile.TemporaryDirectory(prefix="pycoll-check-") as folder:
        found: list[Path] = []
        for name, n, text in (("one process", 1, "dp=1"), (mesh, num_ranks, mesh)):
            into = Path(folder) / str(len(found))
            into.mkdir()
            _run(command, n, text, into, name)
            found.append(into)
        different = next(differences(found[0], found[1], tolerance), None)
        largest = max((d for _, d in _all_differences(found[0], found[1])), default=0.0)
    if different is None:
        typer.echo(
            f"3 steps on {mesh} equal those of one process: largest difference {largest:.1e}"
        )
        return
    what, difference = different
    typer.echo(f"the first tensor that differs: {what}, by {difference:.3g}")
    raise typer.Exit(FAILED)


def _run(command: list[str], n: int, mesh: str, into: Path, name: str) -> None:
    from pycoll.launch.processes import World
    from pycoll.launch.script import Launch
    from pycoll.parallel.tools.check_hooks import FOLDER, NUM_STEPS

    extra = {"PYCOLL_MESH": mesh, FOLDER: str(into)}
    if "OMP_NUM_THREADS" not in os.environ:
        extra["OMP_NUM_THREADS"] = "1"
    typer.echo(f"pycoll check: {NUM_STEPS} steps on {name}", err=True)
    status = Launch([sys.executable, *command], World(n), extra, True, 5.0).run()
    if status:
        raise Error(f"check: the script failed on {name}, with status {status}")
    if not (into / f"step-{NUM_STEPS - 1}.pt").exists():
        raise UsageError(
            f"check: {command[0]} took fewer than {NUM_STEPS} steps of pc.optimizer on {name}"
        )


def differences(one: Path, other: Path, tolerance: float) -> Iterator[tuple[str, float]]:
    """Tensors that differ by more than `tolerance`, in the order in which they are computed.

    Outputs of layers show where a difference starts; alone they do not count as a difference.
    """
    from pycoll.parallel.tools.activations import first_difference

    for part in _parts():
        wrong = [found for found in _of_part(one, other, part) if not found[1] <= tolerance]
        if wrong and part != "start":
            ranks = sorted(other.glob(f"{part}-rank-*.pt"))
            first = first_difference(one / f"{part}-rank-00000.pt", ranks, tolerance)
            if first is not None:
                layer, rank, difference = first
                yield f"output of {layer} of {part}, on {rank}", difference
        yield from wrong


def _parts() -> list[str]:
    from pycoll.parallel.tools.check_hooks import NUM_STEPS

    return ["start", *(f"step-{i}" for i in range(NUM_STEPS))]


def _all_differences(one: Path, other: Path) -> Iterator[tuple[str, float]]:
    for part in _parts():
        yield from _of_part(one, other, part)


def _of_part(one: Path, other: Path, part: str) -> Iterator[tuple[str, float]]:
    import torch

    expected, got = (
        torch.load(folder / f"{part}.pt", map_location="cpu") for folder in (one, other)
    )
    for kind, tensors in expected.items():
        for name in reversed(tensors) if kind == "gradient" else tensors:
            where = " ".join(filter(None, (kind, name, "" if part == "start" else f"of {part}")))
            yield where, _difference(tensors[name], got[kind].get(name))


def _difference(a: Any, b: Any) -> float:
    if b is None or a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) if a.numel() else 0.0
