"""`job.update`: replicas copy nothing, and deaths and arrivals do not change what is trained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from points import Points
from torch import nn
from worlds import Comm, end, start

import pycoll
from pycoll import parallel as pc
from pycoll.elastic.owner_port import free_address
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.recovery.copies import Copies, holding
from pycoll.parallel.recovery.pieces import copied
from pycoll.parallel.recovery.snapshots import Snapshots
from pycoll.parallel.trainer.places import Place
from pycoll.parallel.trainer.training_state import Held

pytestmark = pytest.mark.timeout(120)

STEPS = 8
KILLED = "killed by SIGKILL"


class Counted(nn.Module):
    """Counts forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.count += 1
        return x


def build(mesh: pc.Mesh, zero: int, lr: float = 1e-2) -> dict[str, Any]:
    """A model with a buffer, an average of its weights and a scheduler."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), Counted(), nn.Tanh(), nn.Linear(8, 3)
    model = pc.parallelize(nn.Sequential(*layers).double(), mesh, zero=zero)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=lr), clip=1.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": pc.loader(Points(), 12, mesh),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "ema": pc.EMA(model, 0.9),
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trained(
    comm: Comm | None,
    dies_at: Mapping[int, tuple[int, str]],
    zero: int = 0,
    ends: Callable[[int], str] = lambda commits: "update",
    address: str | None = None,
    waits_at: int = -1,
) -> tuple[dict[str, Any], int, int]:
    """The state after STEPS, the number of steps of this rank, and the ranks at the end.

    Args:
        dies_at: By rank, the commit after which it is killed, and whether before the optimizer's
            step or within `update`.
        zero: Level of ZeRO.
        ends: How a step ends, by the number of commits: with update, or with commit.
        address: Where new ranks come.
        waits_at: The commit after which rank 0 waits for a new rank.
    """
    former = -1 if comm is None else comm.rank
    steps = 0

    def train(job: pc.Job) -> tuple[dict[str, Any], int]:
        nonlocal steps
        while job.commits < STEPS:
            for x, y in job.loader:
                job.model.step(x, y, loss=nn.functional.cross_entropy)
                dies = dies_at.get(former, (-1, ""))
                if dies == (job.commits, "before"):
                    die()
                steps += 1
                while address and former == 0 and job.commits == waits_at and not job.num_waiting:
                    time.sleep(0.01)
                then = [job.scheduler.step, job.ema.update]
                if dies == (job.commits, "within"):
                    then.insert(1, die)
                if ends(job.commits) == "update":
                    job.update(*then)
                else:
                    job.optimizer.step()
                    for function in then:
                        function()
                    job.commit()
                if job.commits == STEPS:
                    break
        tensors = {
            **pc.whole_weights(job.model),
            "count": job.model[1].count,
            **{f"average {name}": value for name, value in job.ema.averages.items()},
        }
        found = {name: value.tolist() for name, value in tensors.items()}
        return {**found, "lr": job.scheduler.get_last_lr()}, job.mesh.world.size

    state, size = pc.elastic(
        lambda mesh: build(mesh, zero), train, comm=comm, join=comm is None, address=address
    )
    return state, steps, size


def assert_close(outcome: Any, expected: dict[str, Any]) -> None:
    found = outcome[0]
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-9, atol=1e-11
        )


def mixed(commits: int) -> str:
    return "commit" if commits in (2, 3, 6) else "update"


def committed(commits: int) -> str:
    return "commit"


@pytest.mark.parametrize(
    ("dies_at", "ends"),
    [
        ({0: (3, "before"), 2: (5, "within")}, lambda commits: "update"),
        ({1: (4, "before"), 2: (3, "within")}, mixed),
        ({2: (0, "within")}, lambda commits: "update"),
    ],
    ids=["updates", "updates and commits", "first update"],
)
def test_update_ranks_that_are_killed_change_nothing(dies_at, ends):
    """Each survivor repeats a step at most once for each death."""
    outcomes = end(start(trained, 3, dies_at, 0, ends))
    (expected, *_) = end(start(trained, 3, {}, 0, committed))[0]
    for rank, outcome in enumerate(outcomes):
        if rank in dies_at:
            assert outcome == KILLED
        else:
            assert_close(outcome, expected)
            assert 0 <= outcome[1] - STEPS <= len(dies_at), outcome[1:]
            assert outcome[2] == 3 - len(dies_at)


def test_update_with_zero_copies_as_commit_does():
    """A rank has a part of the state only, and the average its part of the weights."""
    outcomes = end(start(trained, 3, {1: (3, "before")}, 1))
    (expected, *_) = end(start(trained, 3, {}, 0, committed))[0]
    weights = {name: value for name, value in expected.items() if "average" not in name}
    for rank in (0, 2):
        state, *rest = outcomes[rank]
        own = {name: state[name] for name in weights}
        assert_close((own, *rest), weights)


def test_update_gives_new_ranks_the_state_in_use():
    address = free_address("127.0.0.1")
    old = start(trained, 2, {0: (5, "before")}, 0, lambda commits: "update", address, 0)
    new = start(trained, 0, None, {}, 0, lambda commits: "update", address)
    outcomes = end(old) + end(new)
    (expected, *_) = end(start(trained, 2, {}, 0, committed))[0]
    assert outcomes[0] == KILLED
    for outcome in outcomes[1:]:
        assert_close(outcome, expected)
        assert outcome[2] == 2


def held(flat: torch.Tensor) -> Held:
    return Held("w", "w", flat, Place(Placement((len(flat),)), 0, len(flat)), True)


def test_held_state_is_copied_before_a_step_outside_update():
    snapshots, weights = Snapshots(), torch.ones(3)
    state = [held(weights)]
    snapshots.hold(0, lambda: state, {})
    snapshots.before_change(holds_next=False)
    weights.zero_()
    assert snapshots._newest.all_pieces()["w", state[0].place].tolist() == [1.0, 1.0, 1.0]


def test_held_state_ends_when_it_changes():
    snapshots, weights = Snapshots(), torch.ones(3)
    snapshots.hold(0, lambda: [held(weights)], {})
    assert snapshots._newest.is_whole()
    snapshots.before_change(holds_next=True)
    assert not snapshots._newest.is_whole() and snapshots.number == 0


def test_copies_never_reuse_the_memory_of_a_held_state():
    weights = torch.ones(3)
    state = [held(weights)]
    with pycoll.init() as comm:
        snapshots, copies = Snapshots(), Copies(comm, [(holding(state), 0)], 1)
        snapshots.hold(0, lambda: state, {})
        for number in (1, 2):
            snapshots.take(number, state, {}, copies)
            (copy,) = snapshots._newest.pieces.values()
            assert copy.data_ptr() != weights.data_ptr()


class Failed:
    """A transfer from a rank that has died."""

    def done(self) -> bool:
        return True

    def exception(self) -> Exception:
        return pycoll.PeerDiedError("rank 0 ended", 0)

    def wait(self) -> None:
        raise self.exception()


def test_nothing_waits_for_transfers_of_a_state_that_was_lost():
    state = [held(torch.ones(3))]
    with pycoll.init() as comm:
        snapshots, copies = Snapshots(), Copies(comm, [(holding(state), 0)], 1)
        for number in (0, 1):
            snapshots.take(number, state, {}, copies)
        snapshots._newest.transfers.append(Failed())
        with pytest.raises(pycoll.PeerDiedError):
            snapshots.settle()
        assert snapshots.restore(comm, {"w"}, None).number == 0
        snapshots.settle()


@pytest.mark.parametrize("count", [5, (1 << 16) + 3])
def test_copied_equals_the_piece(count):
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        flat = torch.arange(count + 1).to(dtype)[1:]
        free = torch.empty(count, dtype=dtype)
        assert copied(flat, free) is free and free.equal(flat)
        assert copied(flat).equal(flat)
