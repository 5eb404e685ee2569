"""How long a training stalls when a rank is killed, and what its commits cost without any fault.

python benchmarks/elastic.py
python benchmarks/elastic.py --kills 100 --ranks 4 --json elastic.json
python benchmarks/elastic.py --kills 0 --parameters 25e6

A stall is the time between the commits around a kill, without the time of a step. The cost of a
commit is beside that of a step of the same ranks, both as medians. Ranks are processes of one
thread each.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo  # torch's optimizers import it: once, before ranks are forked
import typer
from torch import Tensor, nn

import pycoll
from pycoll import parallel as pc
from pycoll.bench.record import write_results

WIDTH, CLASSES, STEPS, DIES_AT = 64, 10, 12, 6
BATCH = 32  # samples of all ranks


class Samples:
    """Random samples."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(i)
        return torch.randn(self._width, generator=random), torch.tensor(i % CLASSES)


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds that a rank saw: its steps, its commits, and the stall."""

    steps_s: list[float]
    commits_s: list[float]
    stall_s: float


def train(comm: pycoll.Communicator, width: int, depth: int, zero: int, victim: int) -> Seen:
    """Trains for STEPS steps; the victim is killed after DIES_AT commits."""
    steps_s: list[float] = []
    commits_s: list[float] = []
    ends_s: list[float] = []
    is_victim = comm.rank == victim

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = pc.parallelize(nn.Sequential(*layers, nn.Linear(width, CLASSES)), mesh, zero=zero)
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        return {
            "model": model,
            "optimizer": optimizer,
            "loader": pc.loader(Samples(width), BATCH, mesh),
        }

    def loop(job: pc.Job) -> None:
        for x, y in job.loader:
            began_s = time.monotonic()
            job.model.step(x, y, loss=nn.functional.cross_entropy)
            if is_victim and job.commits == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            job.optimizer.step()
            stepped_s = time.monotonic()
            job.commit()
            ends_s.append(time.monotonic())
            steps_s.append(stepped_s - began_s)
            commits_s.append(ends_s[-1] - stepped_s)
            if job.commits == STEPS:
                return

    pc.elastic(build, loop, comm=comm)
    gap_s = ends_s[DIES_AT] - ends_s[DIES_AT - 1]
    step_s = statistics.median(b - a for a, b in zip(ends_s, ends_s[1:], strict=False))
    return Seen(steps_s, commits_s, gap_s - step_s)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Milliseconds from a kill until the next step has ended, without the step's own time."""

    ranks: int
    zero: int
    kills: int
    p50_ms: float
    p99_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step and of a commit, medians of the slowest rank."""

    ranks: int
    zero: int
    parameters: int
    step_ms: float
    commit_ms: float
    share: float


def stalls(ranks: int, zero: int, kills: int) -> Stalls:
    """Kills a rank in each of so many trainings, each rank in turn."""
    found: list[float] = []
    for turn in range(kills):
        arguments = WIDTH, 2, zero, turn % ranks
        seen = pycoll.run_ranks(train, ranks, *arguments, return_errors=True)
        found.append(1e3 * max(one.stall_s for one in seen if isinstance(one, Seen)))
    found.sort()
    p99 = found[min(int(0.99 * kills), kills - 1)]
    return Stalls(ranks, zero, kills, statistics.median(found), p99, found[-1])


def cost(ranks: int, zero: int, parameters: float) -> Cost:
    """Trains without a fault."""
    width, depth = 1024, max(round(parameters / 1024**2), 1)
    seen = pycoll.run_ranks(train, ranks, width, depth, zero, -1)
    step_ms, commit_ms = (
        1e3 * max(statistics.median(getattr(one, name)[2:]) for one in seen)
        for name in ("steps_s", "commits_s")
    )
    count = depth * (width + 1) * width + (width + 1) * CLASSES
    return Cost(ranks, zero, count, step_ms, commit_ms, commit_ms / step_ms)


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the trainings with a kill.", min=2)] = 4,
    kills: Annotated[int, typer.Option(help="Number of kills for each level of ZeRO.")] = 50,
    parameters: Annotated[float, typer.Option(help="Of the model whose commits are timed.")] = 25e6,
    json_: Annotated[Path | None, typer.Option("--json", help="Writes the rows here.")] = None,
) -> None:
    """Measure the stall after a kill, and the cost of commits."""
    rows: list[Any] = []
    for zero in (0, 1) if kills else ():
        rows.append(row := stalls(ranks, zero, kills))
        typer.echo(
            f"{ranks} ranks, zero {zero}: {kills} kills, stall p50 {row.p50_ms:.1f} ms, "
            f"p99 {row.p99_ms:.1f} ms, worst {row.worst_ms:.1f} ms"
        )
    for zero in (0, 1) if parameters else ():
        rows.append(of := cost(2, zero, parameters))
        typer.echo(
            f"2 ranks, zero {zero}, {of.parameters / 1e6:.1f} M weights: step {of.step_ms:.1f} ms, "
            f"commit {of.commit_ms:.1f} ms, {of.share:.1%}"
        )
    if json_ is not None:
        write_results(json_, rows)


if __name__ == "__main__":
    typer.run(main)
