"""Ranks of an elastic training are killed, stopped or slow, and new ranks come, at random.

The survivors go on, repeat the running step, and end with the weights of a training that nothing
disturbed. The step before it may be repeated, too, if a rank had not yet all copies of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch._dynamo  # the first optimizer imports it, for seconds; ranks are forks
from driving import drawn
from faults import Board, left_over, resources
from hypothesis import strategies as st
from points import Points
from torch import Tensor, nn
from worlds import Process, end, start

import pycoll
from injections import Outcome
from injections.kills import has_ended, kill_all
from pycoll import parallel as pc
from pycoll.chaos.faults import inject
from pycoll.elastic.owner_port import free_address

CASES = 300
FEW = (1, 2, 3)
TIMEOUT_S = 20.0
STEPS = 40
STEP_S = 0.004  # least duration
NEWCOMER_S = 2.0  # in which newcomers that were not taken in are ended
MOST_PAUSE_S = 0.3
TOLERANCE = 1e-10  # of sums in another order

Comm = pycoll.Communicator
Fault = tuple[int, str, int]  # ms, what, rank
# By name: the ranks, the sizes of axes, ZeRO, and ranks that may end at once.
LAYOUTS = {
    "dp": (3, {}, 0, 1),
    "dp of five": (5, {}, 0, 2),
    "zero 1": (3, {}, 1, 1),
    "zero 3": (4, {}, 3, 1),
    "tp": (4, {"tp": 2}, 1, 2),
    "pp": (4, {"pp": 2}, 0, 1),
    "pp of six": (6, {"pp": 2}, 0, 2),
}


@dataclass(frozen=True)
class Disturbed:
    layout: str
    faults: tuple[Fault, ...]
    seed: int  # of the weights
    virtual_replicas: int = 0
    updates: bool = False  # by job.update, else by the optimizer's step and job.commit

    @property
    def is_exact(self) -> bool:
        """Whether the weights have the bits of one process: no other axis than dp shrinks."""
        return self.virtual_replicas > 0 and not LAYOUTS[self.layout][1]

    def calm(self) -> Disturbed:
        """The training without faults that has the same weights on one process."""
        return replace(self, faults=(), layout=self.layout if self.is_exact else "dp")


def some_faults() -> st.SearchStrategy[tuple[Fault, ...]]:
    fault = st.tuples(
        st.integers(0, int(1e3 * STEPS * STEP_S)),
        st.sampled_from(["kill", "kill", "stop", "slow", "new rank"]),
        st.integers(0, 59),
    )
    return st.lists(fault, min_size=1, max_size=3).map(lambda found: tuple(sorted(found)))


def cases() -> st.SearchStrategy[Disturbed]:
    return st.builds(
        Disturbed,
        layout=st.sampled_from(sorted(LAYOUTS)),
        faults=some_faults(),
        seed=st.integers(0, 3),
        virtual_replicas=st.sampled_from([0, 4]),
        updates=st.booleans(),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


@dataclass
class Seen:
    """What a survivor saw."""

    weights: dict[str, list[Any]]
    steps: list[int]  # the commits before each step that it began
    longest_s: float  # between two commits
    size: int


def train(comm: Comm | None, case: Disturbed, address: str, board: Board) -> Seen:
    _, axes, zero, copies = LAYOUTS[case.layout]
    steps: list[int] = []
    times_s: list[float] = []

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        torch.manual_seed(case.seed)
        tp = {"blocks.0": "col", "blocks.2": "row"} if mesh.size("tp") > 1 else None
        model = pc.parallelize(Net().double(), mesh, tp=tp, zero=zero, pp="blocks")
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        return {"model": model, "optimizer": optimizer, "loader": pc.loader(Points(), 12, mesh)}

    def loop(job: pc.Job) -> tuple[dict[str, Any], int]:
        while job.commits < STEPS:
            for x, y in job.loader:
                steps.append(job.commits)
                job.model.step(x, y, loss=nn.functional.cross_entropy, microbatches=2)
                if case.updates:
                    job.update()
                    time.sleep(STEP_S)
                else:
                    job.optimizer.step()
                    time.sleep(STEP_S)
                    job.commit()
                board.note()  # faults begin
                times_s.append(time.monotonic())
                if job.commits == STEPS:
                    break
        return pc.whole_weights(job.model), job.mesh.world.size

    options: dict[str, Any] = {"mesh": axes, "copies": copies, "address": address}
    options["virtual_replicas"] = case.virtual_replicas
    weights, size = pc.elastic(build, loop, comm=comm, join=comm is None, **options)
    longest_s = max((b - a for a, b in zip(times_s, times_s[1:], strict=False)), default=0.0)
    return Seen({name: x.tolist() for name, x in weights.items()}, steps, longest_s, size)


@cache
def undisturbed(calm: Disturbed) -> dict[str, list[Any]]:
    """The weights that one process gets."""
    (seen,) = end(start(train, 1, calm, free_address("127.0.0.1"), Board()))
    return seen.weights


def disturb(
    faults: Sequence[Fault],
    copies: int,
    ranks: list[Process],
    killed: set[int],
    add: Callable[[], None],
    board: Board,
) -> None:
    """Injects the faults, at most as many kills as there are copies; `add` starts a new rank."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while not board.words[0] and time.monotonic() < give_up_s:
        time.sleep(0.001)
    began_s = time.monotonic()
    for after_ms, what, number in faults:
        time.sleep(max(began_s + after_ms / 1e3 - time.monotonic(), 0))
        rank = number % len(ranks)
        pid = ranks[rank].pid
        if what == "new rank":
            add()
        elif what != "kill":
            inject(what, pid, random.Random(number).uniform(0, MOST_PAUSE_S))
        elif len(killed | {rank}) <= copies:
            killed.add(rank)
            inject(what, pid)


def outcomes_of(
    train: Callable[..., Any], num_ranks: int, copies: int, case: Any
) -> tuple[list[Any], set[int]]:
    """What the ranks of a disturbed training return, and which are killed.

    Args:
        train: Called with a communicator, or None on a new rank; the case; the address for new
            ranks; and the board on which it notes when it has begun.
        num_ranks: Number of ranks at the start.
        copies: Number of ranks that may be killed.
        case: Has the `faults`.
    """
    address = free_address("127.0.0.1")
    board = Board()
    ranks = start(train, num_ranks, case, address, board, timeout_s=TIMEOUT_S)
    killed: set[int] = set()
    new: list[Process] = []

    def add() -> None:
        new.extend(start(train, 0, None, case, address, board))

    hang = threading.Timer(3 * TIMEOUT_S, kill_all, [ranks])
    hang.start()
    try:
        disturb(case.faults, copies, ranks, killed, add, board)
        outcomes = end(ranks)
        end_s = time.monotonic() + NEWCOMER_S
        while time.monotonic() < end_s and not all(has_ended(each.pid) for each in new):
            time.sleep(0.001)
        kill_all([each for each in new if not has_ended(each.pid)])
        outcomes += [seen for seen in end(new) if not isinstance(seen, (str, type(None)))]
    finally:
        hang.cancel()
        hang.join()
    return outcomes, killed


def run(case: Disturbed) -> Outcome:
    num_ranks, _, _, copies = LAYOUTS[case.layout]
    return judge(case, *outcomes_of(train, num_ranks, copies, case))


def judge(case: Disturbed, outcomes: list[Any], killed: set[int]) -> Outcome:
    expected, notices_s = undisturbed(case.calm()), []
    tolerance = 0.0 if case.is_exact else TOLERANCE
    for rank, seen in enumerate(outcomes):
        if not isinstance(seen, Seen):
            if rank not in killed:
                return Outcome(f"rank {rank} hung: {seen}")
            continue
        back = max((a - b for a, b in zip(seen.steps, seen.steps[1:], strict=False)), default=0)
        if back > 1:
            return Outcome(f"rank {rank} repeated several committed steps: {seen.steps}")
        for name, weights in seen.weights.items():
            both = (torch.tensor(x, dtype=torch.float64) for x in (weights, expected[name]))
            error = torch.sub(*both).abs().max()
            if not error <= tolerance:
                return Outcome(f"rank {rank}: {name} is wrong by {error}")
        notices_s.append(seen.longest_s)
    return Outcome(
        notices_s=tuple(notices_s),
        label=case.layout + case.is_exact * ", exact",
        amount=len(case.faults),
    )


def run_case(seed: int) -> Outcome:
    case = drawn(cases(), seed)
    undisturbed(case.calm())
    return checked(case, run)


def checked(case: Any, run: Callable[[Any], Outcome]) -> Outcome:
    """The outcome of a case, which also must leave nothing behind."""
    before = resources()
    try:
        outcome = run(case)
    except AssertionError as error:
        outcome = Outcome(str(error))
    complaint = outcome.complaint or left_over(before)
    return replace(outcome, complaint=f"{complaint}\n{case}" if complaint else "")
