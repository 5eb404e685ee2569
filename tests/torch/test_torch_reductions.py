"""Reductions of every dtype by every op against a sum in float64 or int64, blocking and not."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch_ranks import finish, on_ranks, same

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
INTS += [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
CASES = [
    *itertools.product(FLOATS, [*OPS, dist.ReduceOp.AVG]),
    *itertools.product(INTS, [*OPS, *BITS]),
    *itertools.product(COMPLEX, [dist.ReduceOp.SUM, dist.ReduceOp.AVG]),
    *itertools.product([torch.bool], [*OPS, *BITS[:2]]),
]
COUNT = 37


def value(rank: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    """Small whole numbers: every dtype holds them and what is made of them, exactly."""
    numbers = (torch.arange(count) * 3 + rank) % 3 + 1
    return (numbers > 1) if dtype == torch.bool else numbers.to(dtype)


def reduced(op: dist.ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    """The oracle."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if not dtype.is_complex and not dtype.is_floating_point:
        wide = torch.int64
    x = torch.stack([part.to(wide) for part in parts])
    if op == dist.ReduceOp.SUM:
        y = x.sum(0) if dtype != torch.bool else x.amax(0)
    elif op == dist.ReduceOp.AVG:
        y = x.sum(0) / len(parts)
    elif op == dist.ReduceOp.PRODUCT:
        y = x.prod(0)
    elif op == dist.ReduceOp.MIN:
        y = x.amin(0)
    elif op == dist.ReduceOp.MAX:
        y = x.amax(0)
    else:
        folds = (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
        y = functools.reduce(folds[BITS.index(op)], x)
    # fp8 has no conversion from f64 that rounds once.
    return y.to(torch.float32).to(dtype) if dtype.itemsize == 1 and dtype in FLOATS else y.to(dtype)


@on_ranks(1, 2, 3)
def test_reductions_of_every_dtype_and_op_match_the_oracle(rank, n):
    for (dtype, op), is_async in itertools.product(CASES, [False, True]):
        parts = [value(r, dtype) for r in range(n)]
        expected = reduced(op, parts)
        x = parts[rank].clone()
        work = dist.all_reduce(x, op, async_op=is_async)
        finish(work)
        if is_async:
            # Complex tensors come to a backend as pairs of numbers.
            assert work.get_future().value()[0].data_ptr() == x.data_ptr()
        same(x, expected)

        x = parts[rank].clone()
        finish(dist.reduce(x, n - 1, op, async_op=is_async))
        if rank == n - 1:
            same(x, expected)

        whole = [value(r, dtype, COUNT * n) for r in range(n)]
        mine = reduced(op, [w[rank * COUNT : (rank + 1) * COUNT] for w in whole])
        out = torch.empty(COUNT, dtype=dtype)
        finish(dist.reduce_scatter_tensor(out, whole[rank], op, async_op=is_async))
        same(out, mine)
        out = torch.empty(COUNT, dtype=dtype)
        chunks = [chunk.clone() for chunk in whole[rank].chunk(n)]
        finish(dist.reduce_scatter(out, chunks, op, async_op=is_async))
        same(out, mine)


@on_ranks(2)
def test_premul_sum_with_a_number_or_a_tensor_multiplies_first(rank, n):
    for dtype in FLOATS + COMPLEX:
        own = dtype if dtype in FLOATS[:4] else torch.float32
        for factor in (0.5, torch.tensor([2.0]), torch.tensor([0.5], dtype=own)):
            op = dist._make_nccl_premul_sum(factor)
            wide = torch.complex128 if dtype.is_complex else torch.float64
            parts = [value(r, dtype).to(wide) * float(factor) for r in range(n)]
            narrow = torch.float32 if dtype.itemsize == 1 else dtype
            expected = reduced(dist.ReduceOp.SUM, parts).to(narrow).to(dtype)
            x = value(rank, dtype)
            dist.all_reduce(x, op)
            same(x, expected)
            out = torch.empty(COUNT, dtype=dtype)
            dist.reduce_scatter_tensor(out, value(rank, dtype).repeat(n), op)
            same(out, expected)


@on_ranks(2)
def test_reduction_without_a_meaning_raises_value_error_and_leaves_the_group_good(rank, n):
    for dtype, op in [
        (torch.int64, dist.ReduceOp.AVG),
        (torch.bool, dist.ReduceOp.AVG),
        (torch.float32, dist.ReduceOp.BAND),
        (torch.complex64, dist.ReduceOp.MAX),
        (torch.float8_e4m3fnuz, dist.ReduceOp.SUM),
    ]:
        x = torch.zeros(3, dtype=torch.uint8).to(dtype)
        with pytest.raises(ValueError, match="ReduceOp|does not support"):
            dist.all_reduce(x, op)
    # Nothing was sent: the group is good.
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [n, n]
