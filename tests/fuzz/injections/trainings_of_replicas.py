"""Ranks of an elastic training with gossip, local steps or parameter servers are disturbed.

Each step adds 1 to the weights of a replica, or pushes 1 to the servers, which have the weight 0 at
first. So at each commit the weights say whether an acknowledged update is lost or made twice.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch._dynamo  # the first optimizer imports it, for seconds; ranks are forks
from driving import drawn
from faults import Board
from hypothesis import strategies as st
from points import Points
from torch import Tensor, nn

import pycoll
from injections import Outcome
from injections.trainings import STEP_S, STEPS, Fault, checked, outcomes_of, some_faults
from pycoll import parallel as pc

CASES = 200
FEW = (1, 2)
NUM_RANKS, COPIES = 4, 2
TOLERANCE = 1e-9  # of means of three, and of means of pairs

Comm = pycoll.Communicator
WAYS = (
    "gossip",
    "gossip:graph=ring",
    "gossip:graph=ring,mode=sgp",
    "gossip:graph=ring,mode=adpsgd",
    "local:steps=3,outer_lr=1,outer_momentum=0",
    "ps",
    "ps:servers=2,copies=2",
    "ps:mode=async,servers=2",
)


@dataclass(frozen=True)
class Disturbed:
    ways: str
    faults: tuple[Fault, ...]

    @property
    def momentum(self) -> float:
        """That of the servers, where all replicas make a step together."""
        return 0.5 if self.ways.startswith("ps") and "async" not in self.ways else 0.0


@dataclass
class Seen:
    """What a survivor saw: for each commit, its number, the ranks, and the range of weights."""

    commits: list[tuple[int, int, float, float]]
    longest_s: float


def cases() -> st.SearchStrategy[Disturbed]:
    return st.builds(Disturbed, st.sampled_from(WAYS), some_faults())


class Counter(nn.Module):
    """A weight whose gradient is -1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() + 0 * x[:, 0]


def growth(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient is -1 for each element of the weight."""
    return -output.mean()


def train(comm: Comm | None, case: Disturbed, address: str, board: Board) -> Seen:
    seen = Seen([], 0.0)

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        model = pc.parallelize(Counter(), mesh, replicas=case.ways)
        optimizer = pc.optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=case.momentum)
        )
        return {"model": model, "optimizer": optimizer, "loader": pc.loader(Points(), 12, mesh)}

    def loop(job: pc.Job) -> Seen:
        weight = dict(job.model.named_parameters())["weight"].detach()
        while job.commits < STEPS:
            for x, y in job.loader:
                began_s = time.monotonic()
                job.model.step(x, y, loss=growth)
                job.optimizer.step()
                time.sleep(STEP_S)
                try:
                    job.commit()
                finally:
                    now = job.commits, job.mesh.world.size, float(weight.min()), float(weight.max())
                    seen.commits.append(now)
                board.note()
                seen.longest_s = max(seen.longest_s, time.monotonic() - began_s)
                if job.commits == STEPS:
                    break
        job.optimizer.close()
        return seen

    options: dict[str, Any] = {"copies": COPIES, "address": address, "join": comm is None}
    found: Seen = pc.elastic(build, loop, comm=comm, **options)
    return found


def wrong(case: Disturbed, seen: Seen) -> str:
    """What is wrong with what a rank saw; empty: nothing."""
    made: dict[int, int] = {}  # ranks by commit; a repeated one replaces the first
    last = 0
    for number, size, _, _ in seen.commits:
        if last and not last - 1 <= number <= last + 1:
            return f"commit {number} follows {last}"
        made[number] = size
        last = number
    if not seen.commits:  # a new rank that the last commit has taken in
        return ""
    number, _, least, most = seen.commits[-1]
    if number != STEPS:
        return f"the last commit is {number}"
    if "async" not in case.ways:
        steps = itertools.accumulate([1.0] * STEPS, lambda speed, g: case.momentum * speed + g)
        expected = sum(steps)
    elif min(made) == 1:
        expected = float(sum(made.values()))  # each push is an update
    else:
        return ""  # a new rank has not seen how many ranks there were
    if max(abs(least - expected), abs(most - expected)) > TOLERANCE:
        return f"weights from {least} to {most}, expected {expected}"
    return ""


def run(case: Disturbed) -> Outcome:
    outcomes, killed = outcomes_of(train, NUM_RANKS, COPIES, case)
    for rank, seen in enumerate(outcomes):
        if isinstance(seen, Seen):
            if text := wrong(case, seen):
                return Outcome(f"rank {rank}: {text}: {seen.commits}")
        elif rank not in killed:
            return Outcome(f"rank {rank} hung: {seen}")
    notices_s = tuple(seen.longest_s for seen in outcomes if isinstance(seen, Seen))
    return Outcome(notices_s=notices_s, label=case.ways, amount=len(case.faults))


def run_case(seed: int) -> Outcome:
    case = drawn(cases(), seed)
    return checked(case, run)
