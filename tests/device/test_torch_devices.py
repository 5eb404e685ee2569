"""torch's tensors of a device through the backend: CUDA's where there is a GPU, and those of the
emulated device, which the same code serves."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import marks  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch_device_ranks import run_group, run_in_turn, same  # noqa: E402

pytestmark = marks.TORCH

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The rank's values. Their sums round in floating types, and overflow in none."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 20, (count,), generator=generator).to(dtype)


def calls(device: torch.device, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """The results of every collective on this rank's values, in memory of `device`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = values(rank, count, dtype).to(device)
    wide = values(rank, n * count, dtype).to(device)
    results = []

    def keep(result: torch.Tensor) -> None:
        results.append(result.cpu().clone())  # the CPU's own would be written anew

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        y = x.clone()
        dist.all_reduce(y, op)
        keep(y)
    y = x.clone()
    dist.broadcast(y, n - 1)
    keep(y)
    y = x.clone()
    dist.reduce(y, 0)
    if rank == 0:
        keep(y)
    gathered = torch.empty(n * count, dtype=dtype, device=device)
    dist.all_gather_into_tensor(gathered, x)
    keep(gathered)
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    for part in parts:
        keep(part)
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, wide)
    keep(part)
    dist.reduce_scatter(part, list(wide.clone().chunk(n)) if count else [x] * n)
    keep(part)
    exchanged = torch.empty_like(wide)
    dist.all_to_all_single(exchanged, wide)
    keep(exchanged)
    splits = [rank + 1] * n
    uneven = torch.empty(sum(range(1, n + 1)), dtype=dtype, device=device)
    dist.all_to_all_single(
        uneven, values(rank, n * (rank + 1), dtype).to(device), list(range(1, n + 1)), splits
    )
    keep(uneven)
    dist.gather(x, parts if rank == 1 else None, 1)
    if rank == 1:
        for part in parts:
            keep(part)
    dist.scatter(y, list(wide.clone().chunk(n)) if rank == 0 and count else
                 ([x] * n if rank == 0 else None), 0)  # fmt: skip
    keep(y)
    return results


def collectives_give_the_bits_of_the_cpu(device: torch.device) -> None:
    for dtype in DTYPES:
        for count in (1, 1000):
            on_device = calls(device, dtype, count)
            on_cpu = calls(torch.device("cpu"), dtype, count)
            assert len(on_device) == len(on_cpu)
            for i, (got, expected) in enumerate(zip(on_device, on_cpu, strict=True)):
                assert got.equal(expected), f"result {i} of {count} {dtype}"


def tensors_that_are_not_contiguous_and_scaled_sums(device: torch.device) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for place in (torch.device("cpu"), device):
        square = torch.arange(12.0).reshape(3, 4).to(place) + rank
        dist.all_reduce(square.t())
        same(square.cpu(), torch.arange(12.0).reshape(3, 4) * n + sum(range(n)))
        column = square[:, 1]
        dist.broadcast(column, 0, async_op=True).wait()
        y = torch.full((5,), rank + 1.0, device=place)
        dist.all_reduce(y, dist._make_nccl_premul_sum(0.5))
        same(y.cpu(), torch.full((5,), 0.5 * n * (n + 1) / 2))
        dist.all_reduce(y, dist.ReduceOp.AVG)
        same(y.cpu(), torch.full((5,), 0.5 * n * (n + 1) / 2))


def async_operations_do_not_hold_the_host_and_waits_order_streams(device: torch.device) -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1, device=device))
    tensors = [torch.full((50_000,), float(rank + i), device=device) for i in range(4)]
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
    start = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    took_s = time.monotonic() - start
    if rank == 0:
        assert took_s < 1.2, took_s  # and the other rank has not called yet
        assert not works[-1].is_completed()
    for i, (x, handle) in enumerate(zip(tensors, works, strict=True)):
        handle.wait()  # the stream does
        x.mul_(2)
        assert (x.cpu() == 2 * (2 * i + 1)).all()
    works[-1].wait(timedelta(seconds=30))  # the host does
    assert all(handle.is_completed() and handle.is_success() for handle in works)


def dropped_tensors_of_async_operations_are_not_used_anew_too_early(device: torch.device) -> None:
    rank = dist.get_rank()
    kept = []
    for step in range(10):
        x = torch.full((20_000,), float(step + rank), device=device)
        out = torch.empty(40_000, device=device)
        kept.append((dist.all_gather_into_tensor(out, x, async_op=True), out))
        del x
        torch.full((20_000,), -1.0, device=device)  # in x's memory, if that is free
    for step, (handle, out) in enumerate(kept):
        handle.wait()
        halves = out.cpu().reshape(2, -1)
        assert (halves[0] == step).all() and (halves[1] == step + 1).all()


def futures_run_their_callbacks_behind_the_operation(device: torch.device) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=device))
    x = torch.full((30_000,), rank + 1.0, device=device)
    if rank == 1:
        time.sleep(0.2)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same(doubled.wait().cpu(), torch.full((30_000,), 1.0 * n * (n + 1)))


def coalesced_operations_and_functional_collectives(device: torch.device) -> None:
    import torch.distributed._functional_collectives as functional

    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    xs = [torch.full((100 * (i + 1),), float(rank + i), device=device) for i in range(3)]
    with dist._coalescing_manager(group, device, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for i, x in enumerate(xs):
        same(x.cpu(), torch.full((100 * (i + 1),), 2.0 * i + 1))
    outs = [torch.empty(n * 10, device=device) for _ in range(2)]
    with dist._coalescing_manager(group, device):
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((10,), rank + 10.0 * i, device=device))
    for i, out in enumerate(outs):
        same(out.cpu(), torch.arange(n).repeat_interleave(10) + 10.0 * i)
    x = torch.full((8,), rank + 1.0, device=device)
    same(functional.all_reduce(x, "sum", group).cpu(), torch.full((8,), 3.0))
    gathered = functional.all_gather_tensor(x, 0, group)
    same(gathered.cpu(), torch.arange(1.0, n + 1).repeat_interleave(8))
    same(functional.reduce_scatter_tensor(gathered, "sum", 0, group).cpu(), x.cpu() * n)


def messages_arrive_behind_what_their_streams_do(device: torch.device) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in (1, 1000, 300_000):
        x = torch.full((count,), float(rank), device=device)
        got = torch.zeros(count, device=device)
        x.add_(1)
        ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, got, left)]
        for handle in dist.batch_isend_irecv(ops):
            handle.wait()
        same(got.cpu(), torch.full((count,), left + 1.0))
        sent = dist.isend(got * 2, left, tag=5)
        back = torch.zeros(count, 2, device=device)[:, 0]  # not contiguous
        received = dist.irecv(back, right, tag=5)
        same(received.get_future().wait()[0].cpu(), torch.full((count,), 2.0 * (rank + 1)))
        received.wait()
        sent.wait()
    if rank == 0:
        dist.send(torch.arange(5, device=device), 1)
        dist.send(torch.arange(7), 1)  # of the host, to a device
    elif rank == 1:
        x = torch.zeros(5, dtype=torch.long, device=device)
        assert dist.recv(x) == 0
        same(x.cpu(), torch.arange(5))
        x = torch.zeros(7, dtype=torch.long, device=device)
        dist.recv(x, 0)
        same(x.cpu(), torch.arange(7))


def messages_between_devices_are_not_copied_to_the_host(device: torch.device) -> None:
    """By each function, in order and by tags, also where the sender does not know its receiver."""
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    count = 50_000
    module = torch.get_device_module(device)
    num_host_copies = getattr(module, "num_host_copies", lambda: 0)  # CUDA's does not count
    before = num_host_copies()
    x, got = (torch.full((count,), float(value), device=device) for value in (rank, -1))
    if rank == 0:
        dist.send(x, right)
        dist.recv(got, left)
    else:
        assert dist.recv(got) == left
        dist.send(x, right)
    wrong = [(got != left).sum()]
    for handle in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x + 1, right), dist.P2POp(dist.irecv, got, left)]
    ):
        handle.wait()
    wrong.append((got != left + 1).sum())
    sent = [dist.isend(x + step, right, tag=step % 2) for step in range(6)]
    for tag in (1, 0):  # by tag, and in order of the sends
        for step in range(tag, 6, 2):
            rows = torch.zeros(count, 2, device=device)
            back = dist.irecv(rows[:, 1], left, tag=tag)
            back.wait()
            wrong += [(rows[:, 1] != left + step).sum(), rows[:, 0].count_nonzero()]
    for handle in sent:
        handle.wait()
    assert num_host_copies() == before
    assert not any(map(int, wrong)), wrong


def messages_of_the_host_behind_those_of_a_device(device: torch.device) -> None:
    """They begin later, on a thread; a wait for them may begin first."""
    rank = dist.get_rank()
    for step in range(30):
        x = torch.full((100,), rank + 1.0, device=device)
        if rank == 0:
            handles = [dist.isend(x, 1), dist.isend(torch.arange(7) + step, 1)]
        else:
            got, of_host = torch.zeros(100, device=device), torch.zeros(7, dtype=torch.long)
            handles = [dist.irecv(got, 0), dist.irecv(of_host, None)]
        for handle in reversed(handles):
            handle.wait()
        if rank == 1:
            assert handles[1]._source_rank() == 0
            same(got.cpu(), torch.ones(100))
            same(of_host, torch.arange(7) + step)


def barriers_and_early_links(device: torch.device) -> None:
    backend = dist.group.WORLD._get_backend(device)
    backend.eager_connect_single_device(device)
    dist.barrier()
    dist.barrier(device_ids=[device.index])
    options = dist.BarrierOptions()
    options.device = device
    backend.barrier(options).wait()
    assert backend.allocate_tensor(10, device=device, dtype=torch.float32).device == device


def captured_operations_are_replayed_among_others(device: torch.device) -> None:
    """As many frameworks do with a whole step: a graph, replayed, and calls between replays."""
    rank = dist.get_rank()
    x = torch.full((1000,), rank + 1.0, device=device)
    halves = torch.zeros(2000, device=device)
    dist.all_reduce(torch.ones(1, device=device))  # links are made before a capture
    module = torch.get_device_module(device)
    module.synchronize()
    graph, stream = module.CUDAGraph(), torch.Stream(device)
    before = module.current_stream()
    torch.accelerator.set_stream(stream)
    graph.capture_begin()
    dist.all_reduce(x)
    handle = dist.all_gather_into_tensor(halves, x, async_op=True)
    handle.wait()
    with pytest.raises(RuntimeError, match="cannot be captured"):
        dist.send(x, 1 - rank)
    graph.capture_end()
    same(x.cpu(), torch.full((1000,), rank + 1.0))  # nothing has run
    for step in range(100):
        graph.replay()
        assert (halves.cpu() == 3.0).all(), step
        x.fill_(rank + 1.0)
        if step % 10 == 0:
            dist.all_reduce(x, dist.ReduceOp.MAX)  # eager, behind the replay
            assert (x.cpu() == 2).all()
            x.fill_(rank + 1.0)
    stream.synchronize()
    torch.accelerator.set_stream(before)
    graph.reset()


def groups_that_are_split_and_two_backends(device: torch.device) -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        x = torch.full((4,), float(rank), device=device)
        dist.all_reduce(x, group=pair)
        same(x.cpu(), torch.full((4,), 3.0))
    both = dist.new_group(backend=f"cpu:gloo,{device.type}:pycoll")
    for place in (torch.device("cpu"), device):
        x = torch.ones(4, device=place)
        dist.all_reduce(x, group=both)
        same(x.cpu(), torch.full((4,), 3.0))


def tensors_of_several_devices_are_refused(device: torch.device) -> None:
    mixed = [torch.ones(1, device=device), torch.ones(1)]
    with pytest.raises(ValueError, match="another on"):
        dist.all_gather(mixed, torch.ones(1, device=device))
    with pytest.raises(ValueError, match="expected the CPU or a CUDA device"):
        dist.group.WORLD._get_backend(device).allreduce([torch.ones(1, device="meta")])
    dist.all_reduce(torch.ones(1, device=device))


def test_operations_of_two_ranks(kind):
    run_in_turn(
        kind,
        2,
        tensors_that_are_not_contiguous_and_scaled_sums,
        async_operations_do_not_hold_the_host_and_waits_order_streams,
        dropped_tensors_of_async_operations_are_not_used_anew_too_early,
        futures_run_their_callbacks_behind_the_operation,
        coalesced_operations_and_functional_collectives,
        messages_of_the_host_behind_those_of_a_device,
        barriers_and_early_links,
        captured_operations_are_replayed_among_others,
        tensors_of_several_devices_are_refused,
    )


def test_operations_of_three_ranks(kind):
    run_in_turn(
        kind,
        3,
        collectives_give_the_bits_of_the_cpu,
        messages_arrive_behind_what_their_streams_do,
        messages_between_devices_are_not_copied_to_the_host,
        groups_that_are_split_and_two_backends,
    )


def test_errors_name_the_ranks(kind):
    def mismatch(device: torch.device) -> str:
        dist.all_reduce(torch.ones(3, device=device))
        x = torch.ones(50 - dist.get_rank(), device=device)
        with pytest.raises((dist.DistBackendError, ValueError)) as caught:
            for _ in range(100):  # the host hears of it when it calls again
                dist.all_reduce(x)
                time.sleep(0.05)
        return str(caught.value)

    for text in run_group(kind, mismatch, 2):
        assert "rank" in text and "(50,)" in text and "(49,)" in text, text

    def late(device: torch.device) -> str:
        dist.all_reduce(torch.ones(3, device=device))
        if dist.get_rank() == 1:
            time.sleep(4)
            return ""
        work = dist.all_reduce(torch.ones(3, device=device), async_op=True)
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait(timedelta(seconds=20))
        assert not work.is_success() and work.exception() is not None
        return str(caught.value)

    text = run_group(kind, late, 2, timeout_s=1.5)[0]
    assert "Timed out waiting" in text and "rank 1" in text, text
