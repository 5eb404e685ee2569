"""Probes of every dtype in every collective, and of every op. features.py runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

NUM_RANKS = 2

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bool, torch.complex64),
]
REDUCED = [dtype for dtype in DTYPES if dtype != torch.bool]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mine(dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
    """Four numbers that add up exactly in every dtype."""
    rank = dist.get_rank() if rank is None else rank
    return (torch.arange(4) % 2 + rank).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    wide = torch.complex128 if found.is_complex() else torch.float64
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert torch.equal(found.to(wide), expected.to(wide)), f"wrong values: {found}"


def everyone(dtype: torch.dtype) -> list[torch.Tensor]:
    return [mine(dtype, rank) for rank in range(NUM_RANKS)]


def total(dtype: torch.dtype) -> torch.Tensor:
    return sum(x.to(torch.complex128) for x in everyone(dtype)).real.to(dtype)


MOVES = ["broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"]
MOVES += ["all_to_all", "all_to_all_single", "send_and_recv"]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
COLLECTIVES = {**dict.fromkeys(MOVES, DTYPES), **dict.fromkeys(REDUCTIONS, REDUCED)}


def check_collective(name: str, dtype: torch.dtype) -> None:
    """One collective with one dtype."""
    x, at_root = mine(dtype), dist.get_rank() == 0
    copies = [mine(dtype) for _ in range(NUM_RANKS)]
    part, parts = torch.empty_like(x), [torch.empty_like(x) for _ in range(NUM_RANKS)]
    whole = torch.cat(parts)
    if name == "broadcast":
        dist.broadcast(x, src=1)
        same(x, mine(dtype, 1))
    elif name == "scatter":
        dist.scatter(part, everyone(dtype) if at_root else None, src=0)
        same(part, x)
    elif name == "send_and_recv":
        dist.send(x, 1) if at_root else dist.recv(x, 0)
        same(x, mine(dtype, 0))
    elif name in ("all_gather", "gather", "all_to_all"):
        if name == "gather":
            dist.gather(x, parts if at_root else None, dst=0)
        else:
            getattr(dist, name)(parts, x if name == "all_gather" else copies)
        if at_root or name != "gather":
            same(torch.cat(parts), torch.cat(everyone(dtype)))
    elif name in ("all_gather_into_tensor", "all_to_all_single"):
        getattr(dist, name)(whole, x if name == "all_gather_into_tensor" else torch.cat(copies))
        same(whole, torch.cat(everyone(dtype)))
    elif name == "all_reduce":
        dist.all_reduce(x)
        same(x, total(dtype))
    elif name == "reduce":
        dist.reduce(x, dst=0)
        if at_root:
            same(x, total(dtype))
    else:
        getattr(dist, name)(part, copies if name == "reduce_scatter" else torch.cat(copies))
        same(part, total(dtype))


def op_in(collective: str, name: str) -> None:
    dtype = torch.int32 if name in ("BAND", "BOR", "BXOR") else torch.float32
    op = dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    a, b = everyone(dtype)
    results: dict[str, Callable[[], torch.Tensor]] = {
        "SUM": lambda: a + b,
        "AVG": lambda: (a + b) / 2,
        "PRODUCT": lambda: a * b,
        "MIN": lambda: torch.minimum(a, b),
        "MAX": lambda: torch.maximum(a, b),
        "BAND": lambda: a & b,
        "BOR": lambda: a | b,
        "BXOR": lambda: a ^ b,
        "PREMUL_SUM": lambda: (a + b) * 0.5,
    }
    x = mine(dtype)
    if collective == "all_reduce":
        dist.all_reduce(x, op)
    else:
        x = torch.empty_like(x)
        dist.reduce_scatter_tensor(x, torch.cat([mine(dtype)] * NUM_RANKS), op)
    same(x, results[name]())
