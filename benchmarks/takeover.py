"""What a step costs in which a rank of a pipeline is killed, and what readiness for it costs.

python benchmarks/takeover.py
python benchmarks/takeover.py --dp 4 --pp 2 --kills 30 --json takeover.json
python benchmarks/takeover.py --kills 0 --rounds 40

Ranks are killed at random moments of a step: once where other replicas take its work over, and once
where the step is repeated. Stages sleep, so more ranks than cores do not wait for each other. The
price without a fault is that of steps of a GPT, of two trainers that take turns on the same ranks.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo  # torch's optimizers import it: once, before ranks are forked
import typer
from elastic import WARMUP, Texts, gpt_loss, more_s, take_turns
from torch import Tensor, nn
from trainer_variants import GPT, Size

import pycoll
from pycoll import parallel as pc
from pycoll.bench.record import write_results
from pycoll.parallel.pipeline.sleeping import SleepingStage
from pycoll.parallel.recovery.takeover import Takeover

DIES_AT = 5  # commits
LAPS = ("shrink", "takeover", "rest of the step")
PASS_S = 0.01  # of a microbatch in a stage: forward; backward takes twice as long
SAMPLES = 8  # of a replica: one in a microbatch
SIZE = Size(samples=8)


class Stages(nn.Module):
    """A layer for each stage, which sleeps."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SleepingStage() for _ in range(num_stages)))
        for stage in self.blocks:
            stage.times = (PASS_S, PASS_S, PASS_S)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class Numbers:
    """As many samples as are asked for."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.ones(1)


def disturbed(
    comm: pycoll.Communicator, pp: int, takes_over: bool, victim: int, moment: float
) -> tuple[float, float, bool]:
    """Trains; a rank is killed in one step.

    Args:
        pp: Number of stages.
        takes_over: Whether other replicas finish the step.
        victim: The rank.
        moment: When it is killed, as a share of the step.

    Returns:
        Seconds of a usual step, those from its begin to the commit of the step in which the rank is
        killed, and whether the step was finished by others.
    """
    if not takes_over:
        Takeover.is_possible = staticmethod(lambda _: False)  # type: ignore[method-assign]
    begins_s: list[float] = []
    ends_s: list[float] = []
    parts: set[str] = set()

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        stages = Stages(pp).double()
        model = pc.parallelize(stages, mesh, pp="blocks")
        optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batch = SAMPLES * (comm.size // pp)
        return {"model": model, "optimizer": optimizer, "loader": pc.loader(Numbers(), batch, mesh)}

    def train(job: pc.Job) -> None:
        parts.update(job.restart_s)
        # After a takeover the commit leaves this function: the step has ended before.
        if job.commits > len(ends_s):
            ends_s.append(job.failed_s + sum(job.restart_s[p] for p in LAPS))
        loss = nn.functional.mse_loss
        for x, y in job.loader:
            if len(begins_s) == job.commits:  # else the step is repeated
                begins_s.append(time.monotonic())
            if comm.rank == victim and job.commits == DIES_AT:
                step_s = statistics.median(b - a for a, b in zip(begins_s, ends_s, strict=False))
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(moment * step_s, os.kill, kill).start()
            job.model.step(x, y, loss=loss, microbatches=SAMPLES)
            job.optimizer.step()
            job.commit()
            ends_s.append(time.monotonic())
            if job.commits > DIES_AT:
                return

    pc.elastic(build, train, mesh={"pp": pp}, comm=comm)
    before = zip(begins_s[1:DIES_AT], ends_s[1:DIES_AT], strict=True)  # the first one warms up
    usual_s = statistics.median(end_s - begin_s for begin_s, end_s in before)
    return usual_s, ends_s[DIES_AT] - begins_s[DIES_AT], "takeover" in parts


def in_turns(comm: pycoll.Communicator, pp: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of steps of two trainers that take turns, without and with readiness."""
    torch.set_num_threads(1)
    times: tuple[list[float], list[float]] = ([], [])

    def made(mesh: pc.Mesh) -> dict[str, Any]:
        torch.manual_seed(0)
        model = pc.parallelize(GPT(SIZE), mesh, pp="blocks")
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        loader = pc.loader(Texts(), SIZE.samples * mesh.size("dp"), mesh)
        return {"model": model, "optimizer": optimizer, "loader": loader}

    def train(job: pc.Job) -> None:
        plain = made(job.mesh)
        batches = enumerate(zip(plain["loader"], job.loader, strict=True))
        for i, (batch, of_job) in batches:

            def plain_step() -> None:
                plain["model"].step(*batch, loss=gpt_loss, microbatches=4)  # noqa: B023
                plain["optimizer"].step()

            def step() -> None:
                job.model.step(*of_job, loss=gpt_loss, microbatches=4)  # noqa: B023
                job.optimizer.step()

            take_turns(comm, i, times, plain_step, step)
            if i == WARMUP + rounds:
                return

    pc.elastic(made, train, mesh={"pp": pp}, comm=comm)
    return times


@dataclass(frozen=True, slots=True)
class Step:
    """Steps in which a rank is killed, as medians; `lost` is their time beyond that of a step."""

    dp: int
    pp: int
    microbatches: int
    takes_over: bool
    kills: int
    finished: int
    step_ms: float
    lost_ms: float
    lost_steps: float


@dataclass(frozen=True, slots=True)
class Price:
    """Steps without a fault, as medians of pairs."""

    dp: int
    pp: int
    rounds: int
    step_ms: float
    ready_ms: float
    share: float


def steps(dp: int, pp: int, takes_over: bool, kills: int, seed: int) -> Step:
    """Kills a rank in each of so many trainings."""
    chance = random.Random(seed)
    usual_s, lost_s, finished = [], [], 0
    for _ in range(kills):
        victim, moment = chance.randrange(dp * pp), chance.random()
        outcomes = pycoll.run_ranks(
            disturbed, dp * pp, pp, takes_over, victim, moment, return_errors=True
        )
        left = [each for each in outcomes if isinstance(each, tuple)]
        usual_s.append(statistics.median(each[0] for each in left))
        lost_s.append(max(each[1] - each[0] for each in left))
        finished += all(each[2] for each in left)
    step_s, lost = statistics.median(usual_s), statistics.median(lost_s)
    return Step(
        dp, pp, SAMPLES, takes_over, kills, finished, 1e3 * step_s, 1e3 * lost, lost / step_s
    )


def price(dp: int, pp: int, rounds: int) -> Price:
    """Trains without a fault."""
    step_s, ready_s = more_s(pycoll.run_ranks(in_turns, dp * pp, pp, rounds)[0])
    return Price(dp, pp, rounds, 1e3 * step_s, 1e3 * ready_s, ready_s / step_s)


def main(
    dp: Annotated[int, typer.Option(help="Replicas of the trainings with a kill.", min=2)] = 4,
    pp: Annotated[int, typer.Option(help="Stages.", min=2)] = 2,
    kills: Annotated[int, typer.Option(help="Kills, with and without takeover.")] = 20,
    seed: Annotated[int, typer.Option(help="Which ranks are killed, and when.")] = 0,
    rounds: Annotated[int, typer.Option(help="Steps without a fault of each trainer.")] = 20,
    json_: Annotated[Path | None, typer.Option("--json", help="Writes the rows here.")] = None,
) -> None:
    """Measure steps in which a rank is killed, and what readiness costs."""
    rows: list[Any] = []
    for takes_over in (True, False) if kills else ():
        rows.append(row := steps(dp, pp, takes_over, kills, seed))
        how = "taken over" if takes_over else "repeated"
        typer.echo(
            f"dp={dp} pp={pp}, {how}: {kills} kills, {row.finished} steps finished by others; "
            f"a step takes {row.step_ms:.0f} ms, a kill costs {row.lost_ms:.0f} ms, "
            f"{row.lost_steps:.2f} steps"
        )
    if rounds:
        rows.append(of := price(2, pp, rounds))
        typer.echo(
            f"dp=2 pp={pp}, GPT: step {of.step_ms:.1f} ms, readiness adds {of.ready_ms:.1f} ms, "
            f"{of.share:.1%}"
        )
    if json_ is not None:
        write_results(json_, rows)


if __name__ == "__main__":
    typer.run(main)
