"""How long a training stalls when a rank is killed, and what its commits cost without any fault.

python benchmarks/elastic.py
python benchmarks/elastic.py --kills 100 --ranks 4 --json elastic.json
python benchmarks/elastic.py --kills 0 --models gpt --rounds 40

A stall is the time between the commits around a kill, without the time of a step; the table says
where it goes. The cost of commits is the difference between two trainings of one model by the same
ranks, which take turns step by step: one with `pc.elastic`, one without. Ranks are processes of one
thread each.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo  # torch's optimizers import it: once, before ranks are forked
import typer
from torch import Tensor, nn
from trainer_variants import GPT, Size

import pycoll
from pycoll import parallel as pc
from pycoll.bench.record import write_results

WIDTH, CLASSES, STEPS, DIES_AT = 64, 10, 12, 6
BATCH = 32  # samples of all ranks
WARMUP = 3  # rounds
SIZE = Size(blocks=11)
ENDS = ("update", "commit")  # how a step ends
PARTS = ("detection", "shrink", "mesh", "build", "restore", "copies", "step")

_KILLED_AT = mmap.mmap(-1, 8)  # shared with the ranks


class Samples:
    """Random samples for layers of `width` features."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(i)
        return torch.randn(self._width, generator=random), torch.tensor(i % CLASSES)


class Texts:
    """Random tokens."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(i)
        tokens = torch.randint(SIZE.vocab, (SIZE.context + 1,), generator=random)
        return tokens[:-1], tokens[1:]


def layers(width: int, depth: int) -> nn.Module:
    """Linear layers of `width` features."""
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def gpt_loss(output: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained: a model, the samples of one replica's batch, data and a loss."""

    model: Callable[[], nn.Module]
    samples: int
    data: Any
    loss: Callable[[Tensor, Tensor], Tensor]

    def build(self, mesh: pc.Mesh, zero: int, batch: int = 0) -> dict[str, Any]:
        """What `pc.elastic` builds; `batch` is the number of samples of all replicas, if given."""
        torch.manual_seed(0)
        model = pc.parallelize(self.model(), mesh, zero=zero)
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        batch = batch or self.samples * mesh.size("dp")
        return {
            "model": model,
            "optimizer": optimizer,
            "loader": pc.loader(self.data, batch, mesh),
        }


SMALL = Task(lambda: layers(WIDTH, 2), 0, Samples(WIDTH), nn.functional.cross_entropy)
TASKS = {
    "gpt": Task(lambda: GPT(SIZE), SIZE.samples, Texts(), gpt_loss),
    "layers": Task(lambda: layers(1024, 24), 16, Samples(1024), nn.functional.cross_entropy),
}


def ended(job: pc.Job, end: str) -> None:
    """Ends a step."""
    if end == "update":
        job.update()
    else:
        job.optimizer.step()
        job.commit()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a survivor saw: seconds of the stall, and of its parts."""

    stall_s: float
    parts_s: dict[str, float]


def killed(comm: pycoll.Communicator, zero: int, end: str, victim: int) -> Seen:
    """Trains for STEPS steps; the victim is killed after DIES_AT commits."""
    ends_s: list[float] = []
    parts_s: dict[str, float] = {}
    is_victim = comm.rank == victim

    def loop(job: pc.Job) -> None:
        if ends_s:
            (killed_s,) = struct.unpack("d", _KILLED_AT[:])
            parts_s.update({"detection": job.failed_s - killed_s, **job.restart_s})
        began_s = time.monotonic()
        for x, y in job.loader:
            job.model.step(x, y, loss=SMALL.loss)
            if is_victim and job.commits == DIES_AT:
                _KILLED_AT[:] = struct.pack("d", time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            ended(job, end)
            ends_s.append(time.monotonic())
            if parts_s:
                parts_s.setdefault("step", ends_s[-1] - began_s)
            if job.commits == STEPS:
                return

    pc.elastic(lambda mesh: SMALL.build(mesh, zero, BATCH), loop, comm=comm)
    gap_s = ends_s[DIES_AT] - ends_s[DIES_AT - 1]
    step_s = statistics.median(b - a for a, b in zip(ends_s, ends_s[1:], strict=False))
    return Seen(gap_s - step_s, parts_s)


Turn = Callable[[], Any]


def take_turns(
    comm: pycoll.Communicator, turn: int, times: tuple[list[float], list[float]], *calls: Turn
) -> None:
    """Adds the seconds of two calls; each is first in every other turn: caches differ."""
    for which in (0, 1)[:: 1 if turn % 2 else -1]:
        comm.barrier()
        began_s = time.monotonic()
        calls[which]()
        comm.barrier()
        times[which].append(time.monotonic() - began_s)


def more_s(times: tuple[list[float], list[float]]) -> tuple[float, float]:
    """Medians after the warm-up: seconds of the first call, and what the second takes more."""
    first, second = (of[WARMUP:] for of in times)
    pairs = zip(first, second, strict=True)
    return statistics.median(first), statistics.median(b - a for a, b in pairs)


def in_turns(
    comm: pycoll.Communicator, model: str, zero: int, end: str, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps without and with commits, of two trainings that take turns."""
    task, times = TASKS[model], ([], [])
    torch.set_num_threads(1)

    def loop(job: pc.Job) -> None:
        plain = task.build(job.mesh, zero)
        batches = zip(plain["loader"], job.loader, strict=True)
        for batch, of_job in batches:

            def plain_step() -> None:
                plain["model"].step(*batch, loss=task.loss)  # noqa: B023
                plain["optimizer"].step()

            def step() -> None:
                job.model.step(*of_job, loss=task.loss)  # noqa: B023
                ended(job, end)

            take_turns(comm, job.commits, times, plain_step, step)
            if job.commits == WARMUP + rounds:
                return

    pc.elastic(lambda mesh: task.build(mesh, zero), loop, comm=comm)
    return times


@dataclass(frozen=True, slots=True)
class Stalls:
    """Milliseconds from a kill until the next step has ended, without the step's own time."""

    ranks: int
    zero: int
    end: str
    kills: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    parts_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step without commits, and what commits add, as medians."""

    model: str
    zero: int
    end: str
    rounds: int
    step_ms: float
    commit_ms: float
    share: float


def stalls(ranks: int, zero: int, end: str, kills: int) -> Stalls:
    """Kills a rank in each of so many trainings, each rank in turn."""
    worst: list[Seen] = []
    for turn in range(kills):
        seen = pycoll.run_ranks(killed, ranks, zero, end, turn % ranks, return_errors=True)
        survivors = [one for one in seen if isinstance(one, Seen)]
        worst.append(max(survivors, key=lambda one: one.stall_s))
    found = sorted(1e3 * one.stall_s for one in worst)
    p99 = found[min(int(0.99 * kills), kills - 1)]
    parts = {
        part: 1e3 * statistics.median(one.parts_s.get(part, 0.0) for one in worst) for part in PARTS
    }
    return Stalls(ranks, zero, end, kills, statistics.median(found), p99, found[-1], parts)


def cost(model: str, zero: int, end: str, rounds: int) -> Cost:
    """Trains on two ranks, without a fault."""
    step_s, commit_s = more_s(pycoll.run_ranks(in_turns, 2, model, zero, end, rounds)[0])
    return Cost(model, zero, end, rounds, 1e3 * step_s, 1e3 * commit_s, commit_s / step_s)


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the trainings with a kill.", min=2)] = 4,
    kills: Annotated[int, typer.Option(help="Number of kills for each kind of commit.")] = 50,
    models: Annotated[
        str, typer.Option(help="Whose commits are timed: gpt, layers.")
    ] = "gpt,layers",
    rounds: Annotated[int, typer.Option(help="Steps with, and without commits.")] = 20,
    json_: Annotated[Path | None, typer.Option("--json", help="Writes the rows here.")] = None,
) -> None:
    """Measure the stall after a kill, and the cost of commits."""
    cases = [(zero, end) for zero in (0, 1) for end in ENDS if not (zero and end == "update")]
    rows: list[Any] = []
    for zero, end in cases if kills else ():
        rows.append(row := stalls(ranks, zero, end, kills))
        typer.echo(
            f"{ranks} ranks, zero {zero}, {end}: {kills} kills, stall p50 {row.p50_ms:.1f} ms, "
            f"p99 {row.p99_ms:.1f} ms, worst {row.worst_ms:.1f} ms"
        )
        typer.echo("  " + ", ".join(f"{part} {ms:.1f}" for part, ms in row.parts_ms.items()))
    for model in filter(None, models.split(",")):
        for zero, end in cases:
            rows.append(of := cost(model, zero, end, rounds))
            typer.echo(
                f"2 ranks, zero {zero}, {model}: step {of.step_ms:.1f} ms, {end} adds "
                f"{of.commit_ms:.1f} ms, {of.share:.1%}"
            )
    if json_ is not None:
        write_results(json_, rows)


if __name__ == "__main__":
    typer.run(main)
