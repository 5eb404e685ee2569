"""Collectives that move bytes: every dtype, uneven sizes, unusual strides, no elements."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch_ranks import cpu_backend, finish, on_ranks, same

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip


def value(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes, identical on all ranks."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    nbytes = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same_bytes(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (got, expected))
    assert torch.equal(a, b), (got, expected)


@on_ranks(2, 3)
def test_moves_of_every_dtype_bring_the_same_bytes(rank, n):
    for dtype, is_async in itertools.product(DTYPES, (False, True)):
        parts = [value(r, dtype, 5, 7) for r in range(n)]
        mine = parts[rank]
        whole = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)

        for root in range(n):
            x = mine.clone() if rank == root else torch.zeros_like(mine)
            finish(dist.broadcast(x, root, async_op=is_async))
            same_bytes(x, parts[root])

            outs = [torch.zeros_like(mine) for _ in range(n)] if rank == root else None
            finish(dist.gather(mine, outs, root, async_op=is_async))
            for out, part in zip(outs or [], parts, strict=False):
                same_bytes(out, part)

            x = torch.zeros_like(mine)
            finish(dist.scatter(x, parts if rank == root else None, root, async_op=is_async))
            same_bytes(x, mine)

        outs = [torch.zeros_like(mine) for _ in range(n)]
        finish(dist.all_gather(outs, mine, async_op=is_async))
        for out, part in zip(outs, parts, strict=True):
            same_bytes(out, part)

        out = torch.zeros_like(whole)
        finish(dist.all_gather_into_tensor(out, mine, async_op=is_async))
        same_bytes(out, whole)

        # Rank s sends value(100 s + d) to rank d.
        sent = [value(100 * rank + r, dtype, 3) for r in range(n)]
        received = [value(100 * r + rank, dtype, 3) for r in range(n)]
        outs = [torch.zeros_like(sent[0]) for _ in range(n)]
        finish(dist.all_to_all(outs, sent, async_op=is_async))
        for out, expected in zip(outs, received, strict=True):
            same_bytes(out, expected)
        x, y = (torch.cat([p.view(torch.uint8) for p in ps]) for ps in (sent, received))
        out = torch.zeros_like(y).view(dtype)
        finish(dist.all_to_all_single(out, x.view(dtype), async_op=is_async))
        same_bytes(out, y.view(dtype))

        x = torch.zeros_like(mine)
        works = [dist.isend(mine, (rank + 1) % n), dist.irecv(x, (rank - 1) % n)]
        for work in works:
            work.wait()
        same_bytes(x, parts[rank - 1])


@on_ranks(2, 3)
def test_uneven_lists_and_splits_arrive_whole(rank, n):
    lengths = [3, 0, 5][:n]
    parts = [torch.full((length, 2), float(r)) for r, length in enumerate(lengths)]
    outs = [torch.empty_like(part) for part in parts]
    dist.all_gather(outs, parts[rank])
    for out, part in zip(outs, parts, strict=True):
        same(out, part)

    out = torch.empty_like(parts[rank])
    dist.reduce_scatter(out, [torch.ones_like(part) for part in parts])
    same(out, torch.full_like(out, n))

    # Rank s sends s + d rows to rank d.
    send = [rank + d for d in range(n)]
    recv = [s + rank for s in range(n)]
    x = torch.cat([torch.full((rank + d, 2), 10.0 * rank + d) for d in range(n)])
    y = torch.empty((sum(recv), 2))
    dist.all_to_all_single(y, x, recv, send)
    same(y, torch.cat([torch.full((s + rank, 2), 10.0 * s + rank) for s in range(n)]))
    outs = [torch.empty((s + rank, 2)) for s in range(n)]
    dist.all_to_all(outs, list(x.split(send)))
    for s, out in enumerate(outs):
        same(out, torch.full((s + rank, 2), 10.0 * s + rank))


@on_ranks(2)
def test_strided_tensors_are_packed_and_unpacked(rank, n):
    base = torch.zeros(4, 6)
    x = base.t()[::2]  # neither order nor gaps are those of a contiguous tensor
    x += rank + 1
    dist.all_reduce(x)
    same(x, torch.full((3, 4), n * (n + 1) / 2))
    assert (base[:, 1::2] == 0).all()

    images = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    images += torch.arange(3.0).view(1, 3, 1, 1)
    dist.broadcast(images, 1)
    expected = (torch.arange(3.0).view(1, 3, 1, 1) + 1).expand(2, 3, 4, 4)
    same(images.contiguous(), expected.contiguous())

    outs = [torch.zeros(3, 2).t() for _ in range(n)]
    mine = torch.arange(6.0).view(3, 2).t() + rank
    dist.all_gather(outs, mine, async_op=True).wait()
    for r, out in enumerate(outs):
        same(out.contiguous(), (torch.arange(6.0).view(3, 2).t() + r).contiguous())

    conj = torch.full((2,), 1 + 2j).conj()
    # torch refuses it before it comes to us, and its dispatcher reduces a copy.
    cpu_backend().allreduce([conj]).wait()
    same(conj.resolve_conj(), torch.full((2,), n * (1 - 2j)))

    if rank == 0:
        dist.send(torch.arange(6.0).view(2, 3).t(), 1)
    elif rank == 1:
        y = torch.zeros(2, 3).t()
        dist.recv(y, 0)
        same(y.contiguous(), torch.arange(6.0).view(2, 3).t().contiguous())
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    parameter = torch.nn.Parameter(torch.ones(4, 4).t()[:2])
    dist.broadcast(parameter.detach(), 0)


@on_ranks(2)
def test_tensors_without_elements_pass(rank, n):
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    outs = [torch.empty(0, 3) for _ in range(n)]
    dist.all_gather(outs, empty)
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0, 2), torch.empty(0, 2), [0] * n, [0] * n)
    dist.gather(empty, outs if rank == 0 else None, 0)
    dist.scatter(empty, outs if rank == 0 else None, 0)
    if rank == 0:
        dist.send(empty, 1)
    elif rank == 1:
        dist.recv(empty, 0)
    dist.barrier()
    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar)
    assert scalar.item() == 2 * n


@on_ranks(2)
def test_aliases_that_would_mix_results_raise_and_others_work(rank, n):
    buffer = torch.zeros(4)
    for call in (
        lambda: dist.all_gather([buffer] * n, torch.ones(4)),
        lambda: dist.all_to_all([buffer[:2]] * n, list(torch.ones(4).chunk(2))),
    ):
        with pytest.raises(ValueError, match="share memory"):
            call()
    with pytest.raises(ValueError, match="overlaps"):
        dist.all_to_all_single(buffer, buffer)
    # Views of one tensor in order are no copy, and input within the output is no harm.
    whole = torch.zeros(n * 2)
    views = list(whole.chunk(n))
    dist.all_gather(views, torch.full((2,), float(rank)))
    same(whole, torch.arange(n).repeat_interleave(2).float())
    whole = torch.full((n * 2,), float(rank))
    dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
    same(whole, torch.arange(n).repeat_interleave(2).float())
    whole = torch.full((n * 2,), float(rank))
    dist.all_gather_into_tensor(whole, whole[1:3])  # not its place
    same(whole, torch.arange(n).repeat_interleave(2).float())


@on_ranks(2, 3)
def test_large_lists_go_through_kept_memory(rank, n):
    count = 300_001
    parts = [torch.full((count,), float(r)) for r in range(n)]
    outs = [torch.zeros(count) for _ in range(n)]
    works = [dist.all_gather(outs, parts[rank], async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    for out, part in zip(outs, parts, strict=True):
        same(out, part)
    backend = cpu_backend()
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    x = backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu"))
    x.fill_(rank + 1)
    dist.all_reduce(x)
    same(x, torch.full((count,), n * (n + 1) / 2))
    address = x.data_ptr()
    del x
    y = backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu"))
    assert y.data_ptr() == address  # blocks are used again
    dist.destroy_process_group()
    y.fill_(1)  # outlives its group
    assert y.sum() == count
