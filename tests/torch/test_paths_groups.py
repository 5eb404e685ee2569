"""Groups: objects, batches of messages, sub-groups, splitting, and the monitored barrier."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import BACKEND, beyond_gloo, cpu_backend, finish, on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


def an_object(rank: int) -> dict:
    """A different size on each rank; the last is larger than a slot."""
    return {"rank": rank, "data": list(range(10 ** (rank + 2))), "tensor": torch.ones(rank)}


def same(a: dict, b: dict) -> bool:
    equal = torch.equal(a["tensor"], b["tensor"])
    return a["rank"] == b["rank"] and a["data"] == b["data"] and equal


@on_ranks(2, 3)
def test_objects_reach_the_ranks_that_they_are_for(rank, n):
    everyone = [an_object(i) for i in range(n)]
    found: list = [None] * n
    dist.all_gather_object(found, an_object(rank))
    assert all(map(same, found, everyone))
    for root in range(n):
        found = [None] * n
        dist.gather_object(an_object(rank), found if rank == root else None, dst=root)
        assert all(map(same, found, everyone)) if rank == root else found == [None] * n
        sent = everyone if rank == root else [None] * n
        dist.broadcast_object_list(sent, src=root)
        assert all(map(same, sent, everyone))
        got: list = [None]
        dist.scatter_object_list(got, everyone if rank == root else None, src=root)
        assert same(got[0], everyone[rank])
    if rank == 0:
        dist.send_object_list([an_object(1), "two"], dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert same(received[0], an_object(1)) and received[1] == "two"


@on_ranks(2, 3)
def test_batch_of_sends_and_receives_in_any_order(rank, n):
    peers = [peer for peer in range(n) if peer != rank]
    for count in (1, 1000, 100_000):
        sent = {p: torch.full((count * (p + 1),), 10.0 * rank + p) for p in peers}
        found = {p: torch.empty(count * (rank + 1)) for p in peers}
        sends = [dist.P2POp(dist.isend, sent[p], p) for p in peers]
        receives = [dist.P2POp(dist.irecv, found[p], p) for p in peers]
        # Sends first on some ranks, last on others.
        for work in dist.batch_isend_irecv(receives + sends if rank % 2 else sends + receives):
            work.wait()
        for p in peers:
            assert (found[p] == 10.0 * p + rank).all(), (p, count)


def sum_of_powers(rank: int, group: dist.ProcessGroup | None) -> float:
    """The members of a group, as the bits of a number."""
    x = torch.tensor([2.0**rank])
    dist.all_reduce(x, group=group)
    return x.item()


@on_ranks(4)
def test_sub_groups_of_every_kind_reduce_among_their_members(rank, n):
    pair, _ = dist.new_subgroups(2)
    assert sum_of_powers(rank, pair) == [3, 3, 12, 12][rank]
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert sum_of_powers(rank, crossed) == [9, 6, 6, 9][rank]
    three = dist.new_group([0, 2, 3])
    if rank != 1:
        assert sum_of_powers(rank, three) == 1 + 4 + 8
        assert dist.get_group_rank(three, rank) == [0, -1, 1, 2][rank]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert sum_of_powers(rank, mesh.get_group("rows")) == [5, 10, 5, 10][rank]
    assert sum_of_powers(rank, mesh.get_group("columns")) == [3, 3, 12, 12][rank]
    assert sum_of_powers(rank, mesh["rows", "columns"]._flatten().get_group()) == 15
    alone = [dist.new_group([i]) for i in range(4)][rank]
    assert sum_of_powers(rank, alone) == 2**rank
    dist.destroy_process_group(pair)
    assert sum_of_powers(rank, crossed) == [9, 6, 6, 9][rank]
    assert sum_of_powers(rank, None) == 15


@beyond_gloo("Gloo does not split")
@on_ranks(3)
def test_group_splits_into_parts_with_its_own_options(rank, n):
    """torch's Python function for it asks for an accelerator; what it calls does not."""
    parent, backend = dist.group.WORLD, cpu_backend()
    assert backend.supports_splitting and backend.supports_coalescing
    options, limit = copy.deepcopy(backend.options), timedelta(seconds=20)
    assert type(options) is type(backend.options)
    backend.perform_nocolor_split(torch.device("cpu"))
    for name, mine in (("all", [1] if rank == 1 else [0, 2]), ("even", [0, 2])):
        group = parent.split_group(mine, timeout=limit, opts=options, group_name=f"{name} {mine}")
        assert (group is None) == (rank not in mine)
        if group is not None:
            x = torch.tensor([1.0 + rank])
            group.allreduce([x]).wait()
            assert x.item() == sum(1 + r for r in mine)
            assert (group.size(), group.rank()) == (len(mine), mine.index(rank))


@on_ranks(3)
def test_monitored_barrier_names_the_rank_that_is_missing_and_the_group_stays_good(rank, n):
    dist.monitored_barrier()
    if rank != 1:
        with pytest.raises(RuntimeError) as error:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5))
        text = "Rank 1 failed to pass monitoredBarrier in 500 ms"
        assert (text if rank == 0 else "Rank 2 successfully reached") in str(error.value)
    if BACKEND == "gloo":
        return
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="Ranks 1, 2 failed to pass"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == n


@on_ranks(2)
def test_waiting_holds_no_gil(rank, n):
    """Python threads of the waiting rank go on, in a blocking and an asynchronous operation."""
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for is_async in (False, True):
            dist.barrier()
            before = ticks[0]
            if rank == 1:
                time.sleep(0.4)
            finish(dist.all_reduce(torch.ones(1), async_op=is_async))
            assert ticks[0] - before > 20  # up to 400 on a machine that is not busy
    finally:
        stop.set()
        thread.join()


@beyond_gloo("compares both backends")
@on_ranks(2)
def test_functions_that_torch_keeps_for_gloo_take_groups_of_both(rank, n):
    from torch.distributed.distributed_c10d import _set_pg_timeout

    theirs = dist.new_group(backend="gloo")
    for group in (None, theirs):
        dist.monitored_barrier(group)
        _set_pg_timeout(timedelta(seconds=0.5), group)
    group = dist.new_group([0])
    dist.monitored_barrier(group)  # as torch's: no effect but a warning on a rank outside
    assert "wait_all_ranks" in dist.monitored_barrier.__doc__
    if rank == 1:
        time.sleep(1.5)
        return
    for late, text in ((theirs, "Timed out waiting 500ms"), (None, "pycoll: Timed out waiting")):
        with pytest.raises(RuntimeError, match=text):
            dist.barrier(late)
