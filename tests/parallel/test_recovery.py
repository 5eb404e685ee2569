"""Elastic trainings: what is trained does not depend on which ranks end and come."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from points import Points
from torch import nn
from worlds import Comm, end, start

import pycoll
from pycoll import parallel as pc
from pycoll.elastic.owner_port import free_address
from pycoll.parallel.core.mesh import replace_world
from pycoll.parallel.recovery.copies import shares
from pycoll.parallel.recovery.sizes import sizes_for

pytestmark = pytest.mark.timeout(120)

STEPS = 8
KILLED = "killed by SIGKILL"


def build(mesh: pc.Mesh, zero: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    tp = {"0": "col", "2": "row"} if mesh.size("tp") > 1 else None
    model = pc.parallelize(model, mesh, zero=zero, tp=tp)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return {"model": model, "optimizer": optimizer, "loader": pc.loader(Points(), 12, mesh)}


def trained(
    comm: Comm | None,
    dies_at: Mapping[int, int],
    zero: int = 0,
    mesh: Mapping[str, int] | None = None,
    copies: int = 1,
    address: str | None = None,
    most: int | None = None,
    virtual_replicas: int = 0,
    waits_at: int = 0,
) -> tuple[dict[str, list[Any]], int, int]:
    """The weights after STEPS, the number of steps of this rank, and the ranks at the end.

    Args:
        dies_at: By rank, the commit after which it is killed, between backward and the optimizer.
        address: Where new ranks come.
        waits_at: The commit after which rank 0 waits for a new rank.
    """
    steps = 0

    def train(job: pc.Job) -> tuple[dict[str, list[Any]], int]:
        nonlocal steps
        while job.commits < STEPS:
            for x, y in job.loader:
                job.model.step(x, y, loss=nn.functional.cross_entropy)
                if comm is not None and dies_at.get(former) == job.commits:
                    os.kill(os.getpid(), signal.SIGKILL)
                job.optimizer.step()
                steps += 1
                while address and former == 0 and job.commits == waits_at and not job.num_waiting:
                    time.sleep(0.01)
                job.commit()
                if job.commits == STEPS:
                    break
        weights = {name: x.tolist() for name, x in pc.whole_weights(job.model).items()}
        return weights, job.mesh.world.size

    former = -1 if comm is None else comm.rank
    options: dict[str, Any] = {"mesh": mesh, "copies": copies, "address": address, "most": most}
    options["virtual_replicas"] = virtual_replicas
    weights, size = pc.elastic(
        lambda mesh: build(mesh, zero), train, comm=comm, join=comm is None, **options
    )
    return weights, steps, size


def assert_alike(outcome: Any, expected: dict[str, list[Any]]) -> None:
    for name, weights in outcome[0].items():
        torch.testing.assert_close(
            torch.tensor(weights), torch.tensor(expected[name]), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize(
    ("ranks", "dies_at", "options", "left"),
    [
        (3, {0: 3}, {}, 2),
        (4, {1: 2, 3: 5}, {"zero": 3}, 2),
        (4, {2: 0}, {"zero": 1, "mesh": {"tp": 2}}, 3),
        (4, {2: 4, 3: 4}, {"zero": 1, "copies": 2}, 2),
    ],
    ids=["rank 0", "one after another", "before the first commit", "two at once"],
)
def test_ranks_that_are_killed_change_nothing(ranks, dies_at, options, left):
    """The survivors repeat the running step; with messages, also one whose copies had not come."""
    mesh = options.get("mesh")
    arguments = options.get("zero", 0), mesh, options.get("copies", 1)
    outcomes = end(start(trained, ranks, dies_at, *arguments))
    (alone,) = end(start(trained, 1, {}, 0, mesh))
    for rank, outcome in enumerate(outcomes):
        if rank in dies_at:
            assert outcome == KILLED
        else:
            assert_alike(outcome, alone[0])
            _, steps, size = outcome
            assert size == left and steps - STEPS in ((0,) if len(options) == 0 else (0, 1, 2))


def dies_while_copying(comm: Comm, take: int) -> tuple[dict[str, list[Any]], int, int]:
    """Rank 0 says how much it copies to another rank, and ends before it does."""
    send, takes = pycoll.Communicator.send, itertools.count()

    def send_or_die(comm: Comm, x: Any, *args: Any, **options: Any) -> Any:
        is_body = isinstance(x, torch.Tensor)
        if is_body and next(takes) == take and former == 0:
            time.sleep(0.05)  # what was sent before has arrived
            os.kill(os.getpid(), signal.SIGKILL)
        return send(comm, x, *args, **options)

    former = comm.rank
    pycoll.Communicator.send = send_or_die
    return trained(comm, {}, zero=1)


@pytest.mark.parametrize("take", [1, 4])
def test_rank_that_ends_before_it_has_sent_its_copies(take):
    """The others drop the copies that they wait for; they waited for each other before."""
    outcomes = end(start(dies_while_copying, 4, take, timeout_s=5.0))
    (alone,) = end(start(trained, 1, {}))
    assert outcomes[0] == KILLED
    for outcome in outcomes[1:]:
        assert_alike(outcome, alone[0])


def optimized(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def layer() -> nn.Module:
    """Servers have it as several keys."""
    torch.manual_seed(0)
    return nn.Linear(5, 400).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Identical on all ranks, so that any number of replicas has the same mean gradient."""
    points = Points()
    return tuple(map(torch.stack, zip(*(points[4 * step + i] for i in range(4)), strict=True)))


def apart(comm: Comm, replicas: str, dies_at: int) -> tuple[int, int, list[Any]]:
    """The commits, the threads that answer other ranks, and the weights at the end."""

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        if mesh.world.size == 2 and mesh.world.rank == 0:
            gc.collect()
        model = pc.parallelize(layer(), mesh, replicas=replicas)
        return {"model": model, "optimizer": pc.optimizer(optimized(model))}

    def train(job: pc.Job) -> tuple[int, int, list[Any]]:
        while job.commits < STEPS:
            job.model.step(*batch(job.commits), loss=nn.functional.cross_entropy)
            if comm.rank == 2 and job.commits == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            job.optimizer.step()
            job.commit()
        answering = sum("answer" in thread.name for thread in threading.enumerate())
        weights = [p.tolist() for p in job.model.parameters()]
        job.optimizer.close()
        return job.commits, answering, weights

    return pc.elastic(build, train, comm=comm)


@pytest.mark.parametrize("replicas", ["ps:servers=2", "local:steps=3"])
def test_replicas_go_on_apart_with_the_state_of_their_optimizers(replicas):
    """Nor does a garbage collection of rank 0 wait for what rank 1 has left behind."""
    outcomes = end(start(apart, 3, replicas, 3, timeout_s=5.0))
    undisturbed, *_ = end(start(apart, 3, replicas, STEPS, timeout_s=5.0))
    assert outcomes[2] == KILLED
    for commits, answering, weights in outcomes[:2]:
        assert commits == STEPS
        assert answering <= 1  # none for the old ranks
        for found, expected in zip(weights, undisturbed[2], strict=True):
            error = np.abs(np.array(found) - np.array(expected))
            assert error.max() <= 1e-12


def test_new_ranks_come_also_after_rank_0_has_ended():
    address = free_address("127.0.0.1")
    newcomers = start(trained, 0, None, {}, 1, None, 1, address)
    outcomes = end(start(trained, 2, {0: 4}, 1, None, 1, address) + newcomers)
    (alone,) = end(start(trained, 1, {}))
    assert outcomes[0] == KILLED
    for outcome in outcomes[1:]:
        assert_alike(outcome, alone[0])
        assert outcome[2] == 2
    assert outcomes[1][1] >= STEPS > outcomes[2][1]


@pytest.mark.parametrize("zero", [0, 1])
def test_virtual_replicas_give_the_bits_of_an_undisturbed_run(zero):
    """4 ranks become 3 and 2, then 3 by a new one, which waits at the door until there are 2."""
    address = free_address("127.0.0.1")
    options = zero, None, 1, address, 3, 4, 4
    newcomer = start(trained, 0, None, {}, *options)
    outcomes = end(start(trained, 4, {1: 2, 2: 4}, *options) + newcomer)
    (undisturbed,) = end(start(trained, 1, {}, zero, None, 1, None, None, 4))
    assert outcomes[1:3] == [KILLED] * 2
    for outcome in (outcomes[0], *outcomes[3:]):
        assert outcome[2] == 3
        assert outcome[0] == undisturbed[0]  # not one bit differs


def test_new_ranks_wait_while_there_are_as_many_as_wanted():
    address = free_address("127.0.0.1")
    (newcomer,) = start(trained, 0, None, {}, 0, None, 1, address)
    outcomes = end(start(trained, 2, {}, 0, None, 1, address, 1))
    os.kill(newcomer.pid, signal.SIGKILL)
    assert [outcome[1:] for outcome in outcomes] == [(STEPS, 2)] * 2
    assert end([newcomer]) == [KILLED]


def test_ranks_that_are_left_are_those_of_later_meshes():
    def work(comm: Comm) -> int:
        replace_world(comm)  # as `pycoll.init()` in pc.mesh

        def train(job: pc.Job) -> None:
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            job.commit()

        pc.elastic(lambda mesh: build(mesh, 0), train)
        return pc.mesh().world.size

    assert end(start(work, 3)) == [2, KILLED, 2]


def test_too_few_copies_and_too_few_ranks_are_said():
    def work(comm: Comm, least: int, dies_at: Mapping[int, int]) -> str:
        def train(job: pc.Job) -> None:
            for x, y in job.loader:
                job.model.step(x, y, loss=nn.functional.cross_entropy)
                if dies_at.get(former) == job.commits:
                    os.kill(os.getpid(), signal.SIGKILL)
                job.optimizer.step()
                job.commit()

        former = comm.rank
        with pytest.raises(pycoll.Error) as raised:
            pc.elastic(lambda mesh: build(mesh, 1), train, comm=comm, least=least)
        return str(raised.value)

    lost = "more ranks ended at once than there are copies of the state"
    few = "2 of 3 ranks are left, and least=3"
    outcomes = end(start(work, 5, 1, {1: 2, 2: 2}))
    assert all(lost in outcomes[rank] for rank in (0, 3, 4))
    outcomes = end(start(work, 3, 3, {1: 2}))
    assert all(few in outcomes[rank] for rank in (0, 2)), outcomes


def test_what_cannot_move_is_refused_before_the_first_step():
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters())
    for built, text in [
        (model, "build returned Linear, expected a dict"),
        ({"model": model, "optimizer": plain}, "the optimizer is a SGD, expected one"),
        ({"model": model, "loader": [1]}, "'loader', a list without state_dict"),
    ]:
        with pytest.raises(pycoll.UsageError, match=text):
            pc.elastic(lambda mesh, built=built: built, lambda job: None)
    for options in ({"copies": 0}, {"least": 3, "most": 2}, {"mesh": {"tp": 0}}, {"least": 2}):
        with pytest.raises(pycoll.UsageError, match="elastic: "):
            pc.elastic(lambda mesh: {}, lambda job: None, **options)
    with pytest.raises(pycoll.UsageError, match="a new rank needs the address"):
        pc.elastic(lambda mesh: {}, lambda job: None, join=True)


@pytest.mark.pure
def test_sizes_multiply_to_the_ranks_and_are_those_wanted_where_they_divide():
    for wanted in ({}, {"tp": 2}, {"tp": 4, "pp": 2}, {"cp": 3, "tp": 2}, {"ep": 2, "pp": 3}):
        for n in range(1, 33):
            sizes = sizes_for(n, wanted)
            product = 1
            for axis, size in sizes.items():
                product *= size
                assert axis == "dp" or wanted.get(axis, 1) % size == 0
            assert product == n
            fixed = 1
            for size in wanted.values():
                fixed *= size
            if n % fixed == 0:
                assert all(sizes[axis] == size for axis, size in wanted.items())
    assert sizes_for(6, {"tp": 4, "pp": 2})["tp"] == 2


@pytest.mark.pure
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=5, max_size=5), st.integers(0, 3)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
)
def test_each_piece_is_on_one_rank_and_one_host_more_than_there_are_copies(places, copies):
    """Every rank holds one of three pieces of each parameter; some hold the same."""
    holdings = [{f"p{i}": place for i, place in enumerate(of_rank)} for of_rank, _ in places]
    hosts = [host for _, host in places]
    found = shares(holdings, hosts, copies)
    for of in holdings[0]:
        for place in {held[of] for held in holdings}:
            holders = [rank for rank, held in enumerate(holdings) if held[of] == place]
            have = [rank for rank in holders if of in found[rank].keeps]
            for rank in holders:
                for peer, names in found[rank].sends.items():
                    if of in names:
                        assert rank in found[peer].hears and peer not in holders
                        have.append(peer)
            assert len(have) == len(set(have)) == min(copies + 1, len(holdings))
            assert len({hosts[rank] for rank in have}) == min(copies + 1, len(set(hosts)))


@pytest.mark.pure
def test_copies_are_the_same_work_for_all_ranks():
    """Two hosts of two ranks: each sends to its counterpart, and holders take turns."""
    alone = shares([{"p": rank} for rank in range(4)], [0, 0, 1, 1], 1)
    assert [list(share.sends) for share in alone] == [[2], [3], [0], [1]]
    same = shares([{f"p{i}": 0 for i in range(8)}] * 4, [0, 0, 1, 1], 1)
    assert [len(share.keeps) for share in same] == [4] * 4
