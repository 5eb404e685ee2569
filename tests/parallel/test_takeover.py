"""Ranks of pipelines end within a step, and other replicas finish it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from points import Points
from torch import Tensor, nn
from worlds import Comm, end, start

from pycoll import parallel as pc
from pycoll.parallel.recovery import takeover
from pycoll.parallel.recovery.takeover import Work, work_of

pytestmark = pytest.mark.timeout(120)

STEPS, AT = 6, 3  # the commits of the whole training, and of the step in which ranks end
MICROBATCHES, LAYERS = 4, 4
KILLED = "killed by SIGKILL"


class Layer(nn.Module):
    """Calls a function in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.called = nn.Linear(5, 5), lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.called()
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """The first and the last stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5, bias=False)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.after = nn.Linear(5, 5)
        self.after.weight = self.before.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.after(x)
        return out


def trained(
    comm: Comm,
    mesh: Mapping[str, int],
    dies_at: Mapping[int, int],
    commit_every: int = 1,
    dies_in: tuple[int, str] = (-1, ""),
) -> tuple[Any, ...]:
    """A training in which ranks are killed in the forward pass of a microbatch.

    Args:
        dies_at: By rank, the number of forward passes after which it is killed.
        commit_every: Steps for each commit.
        dies_in: A rank that is killed when it calls a function of the takeover, and its name.

    Returns:
        The weights, the commits before each step that began, the last loss and norm, the parts of
        each restart, and the number of layers that ran in the step in which ranks ended.
    """
    began: list[int] = []
    restarts: list[set[str]] = []
    jobs: list[pc.Job] = []
    passes = 0

    def count_pass() -> None:
        nonlocal passes
        if jobs and jobs[-1].commits == AT:
            passes += 1
            if passes == dies_at.get(comm.rank):
                os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == dies_in[0]:
        setattr(takeover, dies_in[1], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        torch.manual_seed(0)
        net = Net().double()
        for block in net.blocks:
            block.called = count_pass
        model = pc.parallelize(net, mesh, pp="blocks")
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.5)
        return {"model": model, "optimizer": optimizer, "loader": pc.loader(Points(), 24, mesh)}

    def train(job: pc.Job) -> tuple[Any, ...]:
        jobs.append(job)
        restarts.append(set(job.restart_s))
        loss = nn.functional.cross_entropy
        while job.commits < STEPS:
            for step, (x, y) in enumerate(job.loader):
                began.append(job.commits)
                result = job.model.step(x, y, loss=loss, microbatches=MICROBATCHES)
                norm = job.optimizer.step()
                if step % commit_every == commit_every - 1:
                    job.commit()
                if job.commits == STEPS:
                    break
        return pc.whole_weights(job.model), result.loss, norm

    weights, loss, norm = pc.elastic(build, train, mesh=mesh, comm=comm, copies=2)
    values = {name: x.tolist() for name, x in weights.items()}
    return values, began, (loss, norm), restarts, passes


@pytest.fixture(scope="module")
def alone() -> Any:
    (outcome,) = end(start(trained, 1, {}, {}))
    return outcome


def check(outcomes: list[Any], alone: Any, killed: set[int]) -> list[Any]:
    """Checks what the survivors have; returns it."""
    left = [outcome for rank, outcome in enumerate(outcomes) if rank not in killed]
    assert [outcomes[rank] for rank in sorted(killed)] == [KILLED] * len(killed)
    for weights, _, of_last_step, *_ in left:
        torch.testing.assert_close(of_last_step, alone[2], rtol=1e-10, atol=0)
        for name, of_alone in alone[0].items():
            found, expected = torch.tensor(weights[name]), torch.tensor(of_alone)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    return left


@pytest.mark.parametrize(
    ("ranks", "dies_at", "again"),
    [(4, {3: 3}, [4, 4]), (6, {0: 5, 4: 1}, [4, 4]), (4, {0: 2, 3: 7}, [])],
    ids=["last stage", "two of six", "no replica is whole"],
)
def test_no_step_begins_twice(ranks, dies_at, again, alone):
    """`again`: by rank of a whole replica, the microbatches that it takes over."""
    outcomes = end(start(trained, ranks, {"pp": 2}, dies_at, timeout_s=10.0))
    left = check(outcomes, alone, set(dies_at))
    for _, began, _, restarts, _ in left:
        assert began == list(range(STEPS))
        assert [("takeover" in parts) for parts in restarts] == [False, True]
    whole = max(range(ranks // 2), key=lambda r: not {r, r + ranks // 2} & set(dies_at))
    for rank, more in zip((whole, whole + ranks // 2), again, strict=False):
        assert outcomes[rank][-1] == LAYERS // 2 * (MICROBATCHES + more)


@pytest.mark.parametrize(
    "dies_in",
    [(1, "survivors"), (0, "split")],
    ids=["a replica has no rank left", "a rank ends while it takes over"],
)
def test_step_is_repeated(dies_in, alone):
    outcomes = end(start(trained, 4, {"pp": 2}, {3: 3}, 1, dies_in, timeout_s=10.0))
    for _, began, _, restarts, _ in check(outcomes, alone, {3, dies_in[0]}):
        assert began == [0, 1, 2, 3, 3, 4, 5]
        assert "takeover" not in restarts[-1]


def test_steps_behind_one_that_was_taken_over_are_repeated_without_a_commit(alone):
    outcomes = end(start(trained, 4, {"pp": 2}, {3: 3}, 2, timeout_s=10.0))
    (undisturbed,) = end(start(trained, 1, {}, {}, 2))
    for _, began, *_ in check(outcomes, undisturbed, {3}):
        assert began[: 2 * AT + 4] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]


def doing(stage: int, replica: int, **options: Any) -> dict[str, Any]:
    usual = {"step": 7, "replicas": 3, "finished": True, "can_send": True}
    return {**usual, "stage": stage, "replica": replica, **options}


def test_work_is_shared_by_as_many_pipelines_as_there_are_ranks_of_each_stage():
    lost = {(1, 0)}
    left = [(s, r) for s in range(2) for r in range(3) if (s, r) not in lost]
    doings = [doing(s, r, finished=r > 0) for s, r in left]
    assert work_of(doings, 2) == Work([[1, 3], [2, 4]], {0: 0})


def test_pipelines_mix_replicas_where_none_is_whole():
    doings = [doing(0, 0, replicas=2, finished=False), doing(1, 1, replicas=2, finished=False)]
    assert work_of(doings, 2) == Work([[0, 1]], {0: 0, 1: 1})


@pytest.mark.parametrize(
    "doings",
    [
        [doing(0, 0), None],
        [doing(0, 0), doing(1, 0, step=8)],
        [doing(0, 0), doing(0, 1), doing(0, 2)],
        [doing(0, 0), doing(1, 0), doing(0, 1), doing(1, 1)],
        [doing(s, r) for s in range(2) for r in range(2)] + [doing(0, 2, can_send=False)],
    ],
    ids=["not in a step", "other steps", "no last stage", "no replica 2", "nothing to send"],
)
def test_step_is_repeated_where_work_cannot_be_taken_over(doings):
    assert work_of(doings, 2) is None
