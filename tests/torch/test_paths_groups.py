"""Objects, batches of sends and receives, coalescing, sub-groups, and the monitored barrier."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import BACKEND, run_with_group  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

beyond_gloo = pytest.mark.skipif(BACKEND == "gloo", reason="Gloo has none of it")


def an_object(rank: int) -> dict:
    """Of another size on each rank; the last is larger than a slot."""
    return {"rank": rank, "data": list(range(10 ** (rank + 2))), "tensor": torch.ones(rank)}


def same(a: dict, b: dict) -> bool:
    return a["rank"] == b["rank"] and a["data"] == b["data"] and torch.equal(*map(tensor, (a, b)))


def tensor(x: dict) -> torch.Tensor:
    return x["tensor"]


@pytest.mark.parametrize("n", [2, 3])
def test_objects_reach_whom_they_are_for(n):
    def work() -> int:
        rank, passed = dist.get_rank(), 0
        everyone = [an_object(i) for i in range(n)]
        found: list = [None] * n
        dist.all_gather_object(found, an_object(rank))
        passed += all(map(same, found, everyone))
        for root in range(n):
            found = [None] * n
            dist.gather_object(an_object(rank), found if rank == root else None, dst=root)
            passed += all(map(same, found, everyone)) if rank == root else found == [None] * n
            sent = everyone if rank == root else [None] * n
            dist.broadcast_object_list(sent, src=root)
            passed += all(map(same, sent, everyone))
            got: list = [None]
            dist.scatter_object_list(got, everyone if rank == root else None, src=root)
            passed += same(got[0], everyone[rank])
        received = [None]
        if rank == 0:
            dist.send_object_list([an_object(1)], dst=1)
        elif rank == 1:
            dist.recv_object_list(received, src=0)
            passed += same(received[0], an_object(1))
        return passed

    assert run_with_group(work, n) == [1 + 3 * n + (rank == 1) for rank in range(n)]


@pytest.mark.parametrize("n", [2, 3])
def test_batch_of_sends_and_receives_in_any_order(n):
    def work() -> bool:
        rank = dist.get_rank()
        peers = [peer for peer in range(n) if peer != rank]
        sent = {p: torch.full((1000 * (p + 1),), 10.0 * rank + p) for p in peers}
        found = {p: torch.empty(1000 * (rank + 1)) for p in peers}
        sends = [dist.P2POp(dist.isend, sent[p], p) for p in peers]
        receives = [dist.P2POp(dist.irecv, found[p], p) for p in peers]
        # Sends first on some ranks, last on others.
        for work in dist.batch_isend_irecv(receives + sends if rank % 2 else sends + receives):
            work.wait()
        return all(bool((found[p] == 10.0 * p + rank).all()) for p in peers)

    assert run_with_group(work, n) == [True] * n


@beyond_gloo
def test_coalescing_manager_runs_several_as_one():
    def work() -> list[list[float]]:
        rank = dist.get_rank()
        xs = [torch.full((3,), float(rank + i)) for i in range(4)]
        with dist._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
        ys = [torch.full((2,), float(rank + i)) for i in range(2)]
        gathered = [torch.empty(4) for _ in ys]
        with dist._coalescing_manager(async_ops=True) as manager:
            for out, y in zip(gathered, ys, strict=True):
                dist.all_gather_single(out, y)
        manager.wait()
        parts = [torch.empty(2) for _ in range(2)]
        with dist._coalescing_manager(device=torch.device("cpu")):
            for i, part in enumerate(parts):
                dist.reduce_scatter_tensor(part, torch.arange(4.0) + i)
        return [t.tolist() for t in (*xs, *gathered, *parts)]

    expected = [[1.0 + 2 * i] * 3 for i in range(4)]
    expected += [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]]
    first, second = run_with_group(work, 2)
    assert first[:6] == second[:6] == expected
    assert first[6:] == [[0.0, 2.0], [2.0, 4.0]]
    assert second[6:] == [[4.0, 6.0], [6.0, 8.0]]


def test_sub_groups_of_every_kind():
    def work() -> list[float]:
        rank = dist.get_rank()
        results = []

        def reduce_in(group) -> None:
            x = torch.tensor([2.0**rank])
            dist.all_reduce(x, group=group)
            results.append(x.item())

        pair, _ = dist.new_subgroups(2)
        reduce_in(pair)
        own, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        reduce_in(own)
        group = dist.new_group([0, 2, 3])
        if rank != 1:
            reduce_in(group)
            assert dist.get_group_rank(group, rank) == [0, -1, 1, 2][rank]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        reduce_in(mesh.get_group("rows"))
        reduce_in(mesh.get_group("columns"))
        alone = [dist.new_group([i]) for i in range(4)][rank]
        reduce_in(alone)
        dist.destroy_process_group(pair)
        reduce_in(own)
        reduce_in(None)
        return results

    pairs, crossed = [3, 3, 12, 12], [9, 6, 6, 9]
    for rank, found in enumerate(run_with_group(work, 4)):
        three = [] if rank == 1 else [1 + 4 + 8]
        rows, columns = [5, 10, 5, 10][rank], pairs[rank]
        own = crossed[rank]
        assert found == [pairs[rank], own, *three, rows, columns, 2**rank, own, 15]


@beyond_gloo
def test_group_splits_into_parts():
    """torch's Python function for it asks for an accelerator; what it calls does not."""

    def work() -> list[float]:
        rank, parent = dist.get_rank(), dist.group.WORLD
        mine = [1] if rank == 1 else [0, 2]
        options = copy.deepcopy(parent._get_backend(torch.device("cpu")).options)
        limit = timedelta(seconds=20)
        group = parent.split_group(mine, timeout=limit, opts=options, group_name=f"of {mine}")
        x = torch.tensor([1.0 + rank])
        group.allreduce([x]).wait()
        return [x.item(), group.size(), group.rank()]

    assert run_with_group(work, 3) == [[4, 2, 0], [2, 1, 0], [4, 2, 1]]


def test_group_may_be_made_anew_after_it_was_destroyed(tmp_path):
    def work() -> list[float]:
        rank, found = dist.get_rank(), []
        for i in range(5):
            dist.destroy_process_group()
            store = dist.FileStore(str(tmp_path / f"store{i}"), 2)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2)
            x = torch.tensor([float(rank + i)])
            dist.all_reduce(x)
            found.append(x.item())
        return found

    assert run_with_group(work, 2) == [[1, 3, 5, 7, 9]] * 2


def test_monitored_barrier_names_the_rank_that_does_not_come_and_the_group_stays_good():
    def work() -> tuple[str, float]:
        dist.monitored_barrier()
        text = ""
        if dist.get_rank() != 1:
            with pytest.raises(RuntimeError) as error:
                dist.monitored_barrier(timeout=timedelta(seconds=0.5))
            text = str(error.value)
        x = torch.ones(1)
        if BACKEND != "gloo":
            dist.all_reduce(x)
        return text, x.item()

    found = run_with_group(work, 3)
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in found[0][0]
    assert "Rank 2 successfully reached monitoredBarrier" in found[2][0]
    if BACKEND != "gloo":
        assert [x for _, x in found] == [3, 3, 3]


def test_waiting_holds_no_gil():
    """Python threads of the late rank's peer go on while it waits, blocking and asynchronous."""

    def work() -> int:
        x, ticks, stop = torch.ones(1), [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        lowest = 10**9
        for is_async in (False, True):
            dist.barrier()
            before = ticks[0]
            if dist.get_rank() == 1:
                time.sleep(0.5)
            work = dist.all_reduce(x, async_op=is_async)
            if is_async:
                work.wait()
            lowest = min(lowest, ticks[0] - before)
        stop.set()
        thread.join()
        return lowest

    assert min(run_with_group(work, 2)) > 50


@beyond_gloo
def test_functions_that_torch_keeps_for_gloo_take_groups_of_both():
    def work() -> tuple[str, float, str]:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        theirs = dist.new_group(backend="gloo")
        for group in (None, theirs):
            dist.monitored_barrier(group)
            _set_pg_timeout(timedelta(seconds=0.5), group)
        group = dist.new_group([0])
        dist.monitored_barrier(group)  # as torch's: nothing, with a warning, where not a member
        texts, begin = [], time.monotonic()
        for late in (theirs, None):
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError) as error:
                    dist.barrier(late)
                texts.append(str(error.value))
        seconds = time.monotonic() - begin
        if dist.get_rank() == 1:
            time.sleep(2)
        return " ".join(texts), seconds, dist.monitored_barrier.__doc__ or ""

    (text, seconds, doc), _ = run_with_group(work, 2)
    assert "Timed out waiting 500ms" in text  # Gloo's
    assert "pycoll: Timed out waiting" in text
    assert 1 <= seconds < 1.9
    assert "wait_all_ranks" in doc
