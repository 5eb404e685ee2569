"""Works and futures, coalescing, messages, hooks: what runs beside the caller."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch_ranks import cpu_backend, on_ranks, run_group, same

pytestmark = [pytest.mark.ranks, pytest.mark.torch]


@on_ranks(3)
def test_async_operations_end_in_order_and_futures_chain(rank, n):
    tensors = [torch.full((100,), float(i + rank)) for i in range(50)]
    futures = [dist.all_reduce(x, async_op=True).get_future() for x in tensors]
    doubled = [f.then(lambda f: f.value()[0] * 2) for f in futures]
    for i, future in enumerate(doubled):
        same(future.wait(), torch.full((100,), 2.0 * sum(i + r for r in range(n))))


@on_ranks(2)
def test_dropped_works_keep_their_tensors_until_the_end(rank, n):
    for _ in range(100):
        dist.all_reduce(torch.ones(10_000), async_op=True)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == n


@on_ranks(3)
def test_messages_arrive_from_any_source_and_by_their_tags(rank, n):
    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            y = torch.zeros(1)
            source = dist.recv(y, tag=7)
            assert y.item() == source
            seen.add(source)
        assert seen == set(range(1, n))
    else:
        dist.send(torch.full((1,), float(rank)), 0, tag=7)
    # Tags choose the message, not the order.
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, tag=1)
        dist.isend(torch.tensor([2.0]), 1, tag=2).wait()
    elif rank == 1:
        for tag in (2, 1):
            y = torch.zeros(1)
            dist.irecv(y, 0, tag=tag).wait()
            assert y.item() == tag
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        y = torch.zeros(3)
        same(dist.irecv(y, 0).get_future().wait()[0], torch.ones(3))


@on_ranks(2)
def test_coalesced_operations_give_what_single_ones_give(rank, n):
    def coalesced(is_async: bool, call, *arguments: list) -> None:
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for each in zip(*arguments, strict=True):
                call(*each)
        if is_async:
            manager.wait()

    for is_async in (False, True):
        xs = [torch.full((i + 1,), float(rank + i)) for i in range(5)]
        coalesced(is_async, dist.all_reduce, xs)
        for i, x in enumerate(xs):
            same(x, torch.full((i + 1,), float(sum(r + i for r in range(n)))))
        outs = [torch.zeros(n * (i + 1)) for i in range(3)]
        ins = [torch.full((i + 1,), float(rank)) for i in range(3)]
        coalesced(is_async, dist.all_gather_into_tensor, outs, ins)
        for i, out in enumerate(outs):
            same(out, torch.arange(n).repeat_interleave(i + 1).float())
        outs = [torch.zeros(i + 1) for i in range(3)]
        ins = [torch.arange(n).repeat_interleave(i + 1).float() + i for i in range(3)]
        coalesced(is_async, dist.reduce_scatter_tensor, outs, ins)
        for i, out in enumerate(outs):
            same(out, torch.full((i + 1,), float(n * (rank + i))))
    # With a device, the backend itself collects what is called.
    x, y = torch.ones(3), torch.full((2,), float(rank))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as cm:
        dist.group.WORLD.allreduce([x])
        dist.group.WORLD.broadcast(y, 1)
    cm.wait()
    assert x.tolist() == [n] * 3 and y.tolist() == [1, 1]
    same(cm.works[0].get_future().wait()[0], x)
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), 9.0)])
    for r, (a, b) in enumerate(lists):
        assert a.tolist() == [r, r] and b.tolist() == [9, 9, 9]


@on_ranks(3)
def test_sparse_tensors_are_added_up(rank, n):
    x = torch.zeros(6, 2)
    x[rank] = 1
    x[5, 1] = rank + 1
    sparse = x.to_sparse()
    dist.all_reduce(sparse)
    expected = torch.zeros(6, 2)
    expected[:n] = 1
    expected[5, 1] = n * (n + 1) / 2
    same(sparse.to_dense(), expected)


@on_ranks(2)
def test_profiler_sees_operations_under_their_names(rank, n):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        dist.all_reduce(torch.ones(2))
        dist.all_gather([torch.zeros(2) for _ in range(n)], torch.ones(2), async_op=True).wait()
        dist.barrier()
    names = {event.name for event in prof.events()}
    assert {"pycoll:all_reduce", "pycoll:all_gather", "pycoll:barrier"} <= names, names


@on_ranks(2)
def test_event_of_the_profiler_ends_before_those_who_wait_for_a_future_go_on(rank, n):
    """A profiler that stops then frees the event. Sleeps for 0.6 s."""
    if rank == 1:
        time.sleep(0.1)  # so that rank 0 waits, and its callback runs at the end
        dist.all_reduce(torch.ones(2))
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.get_future().then(lambda _: time.sleep(0.5)).wait()
        work.wait()
    (event,) = (event for event in prof.events() if event.name == "pycoll:all_reduce")
    assert event.time_range.elapsed_us() < 400_000, event


def test_completion_hook_and_sequence_numbers_see_every_operation(capfd):
    def work(rank: int, n: int) -> None:
        seen = []

        def hook(info: dist._WorkInfo) -> None:
            seen.append(info)
            if info.seq == 2:
                raise ValueError("a hook of a user")

        group = dist.new_group()
        backend = cpu_backend(group)
        assert backend._get_sequence_number_for_group() == 0
        group._register_on_completion_hook(hook)
        for _ in range(3):
            dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
        dist.barrier(group=group)
        group._wait_for_pending_works()
        assert [info.seq for info in seen] == [1, 2, 3, 4]
        assert [str(info.op_type).rpartition(".")[2] for info in seen[:1]] == ["ALLREDUCE"]
        assert all(info.active_duration.total_seconds() >= 0 for info in seen)
        assert backend._get_sequence_number_for_group() == 4

    run_group(work, 2)  # in fresh ranks, which print where capfd reads
    assert "the completion hook raised: ValueError: a hook of a user" in capfd.readouterr().err
