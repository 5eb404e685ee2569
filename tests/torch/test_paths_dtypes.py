"""Every dtype in every collective, with what Gloo refuses on a CPU: int16, fp8, PREMUL_SUM."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import BACKEND, run_with_group  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.ranks,
    pytest.mark.skipif(BACKEND == "gloo", reason="Gloo refuses int16, fp8 and PREMUL_SUM"),
]

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
COMPLEX = [torch.complex64, torch.complex128]
MOVED_ONLY = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.uint32]
COUNT = 37


def values(rank: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    """Small numbers, exact in every dtype, and so are their sums and products of three ranks."""
    x = (torch.arange(count) + rank) % 2
    if dtype == torch.bool:
        return x.bool()
    if dtype in COMPLEX:
        return torch.complex(x.double(), -x.double()).to(dtype)
    return (x + 1).to(dtype) if dtype in INTEGERS or dtype in FLOATS else x.float().to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x.view(torch.uint8)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In their bits: some dtypes cannot compare."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype in COMPLEX else torch.float64


def test_every_dtype_moves_in_every_collective():
    def work() -> dict[str, list[str]]:
        n, rank = dist.get_world_size(), dist.get_rank()
        wrong: dict[str, list[str]] = {}
        for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *MOVED_ONLY]:

            def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
                if not equal(found, expected):
                    wrong.setdefault(str(dtype), []).append(name)  # noqa: B023

            mine, everyone = values(rank, dtype), [values(i, dtype) for i in range(n)]
            empty = torch.zeros(COUNT).to(dtype)
            x = mine.clone()
            dist.broadcast(x, src=1)
            check("broadcast", x, everyone[1])
            parts = [empty.clone() for _ in range(n)]
            dist.all_gather(parts, mine)
            check("all_gather", torch.cat(parts), torch.cat(everyone))
            whole = torch.zeros(n * COUNT).to(dtype)
            dist.all_gather_single(whole, mine)
            check("all_gather_single", whole, torch.cat(everyone))
            dist.gather(mine, parts if rank == 0 else None, dst=0)
            check("gather", torch.cat(parts), torch.cat(everyone))
            x = empty.clone()
            dist.scatter(x, everyone if rank == 2 else None, src=2)
            check("scatter", x, mine)
            sent = torch.cat([values(rank + i, dtype) for i in range(n)])
            dist.all_to_all_single(whole, sent)
            check(
                "all_to_all_single", whole, torch.cat([values(rank + i, dtype) for i in range(n)])
            )
            dist.all_to_all(parts, list(sent.chunk(n)))
            check(
                "all_to_all",
                torch.cat(parts),
                torch.cat([values(rank + i, dtype) for i in range(n)]),
            )
            x, works = empty.clone(), []
            works.append(dist.isend(mine, (rank + 1) % n))
            works.append(dist.irecv(x, (rank - 1) % n))
            for one in works:
                one.wait()
            check("send, recv", x, everyone[rank - 1])
        return wrong

    assert run_with_group(work, 3) == [{}] * 3


def expected_of(op: str, xs: list[torch.Tensor]) -> torch.Tensor:
    dtype = xs[0].dtype
    if op in ("BAND", "BOR", "BXOR"):
        function = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
        result = xs[0]
        for x in xs[1:]:
            result = function[op](result, x)
        return result
    stacked = torch.stack([x.to(wide(dtype)) for x in xs])
    if op == "SUM":
        return stacked.sum(0).to(dtype)
    if op == "AVG":
        return (stacked.sum(0) / len(xs)).to(dtype)
    if op == "PRODUCT":
        return stacked.prod(0).to(dtype)
    return (stacked.amin(0) if op == "MIN" else stacked.amax(0)).to(dtype)


def test_every_dtype_is_reduced_in_every_collective_that_reduces():
    ops = {
        "SUM": [*INTEGERS, *FLOATS, *COMPLEX],
        "PRODUCT": [*INTEGERS, *FLOATS],  # torch itself refuses complex ones
        "AVG": [*FLOATS, *COMPLEX],
        "MIN": [*INTEGERS, *FLOATS],
        "MAX": [*INTEGERS, *FLOATS],
        "BAND": INTEGERS,
        "BOR": INTEGERS,
        "BXOR": INTEGERS,
    }

    def work() -> dict[str, list[str]]:
        n, rank = dist.get_world_size(), dist.get_rank()
        wrong: dict[str, list[str]] = {}
        for op, dtypes in ops.items():
            reduce_op = getattr(dist.ReduceOp, op)
            for dtype in dtypes:

                def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
                    off = (found.to(wide(dtype)) - expected.to(wide(dtype))).abs().max()  # noqa: B023
                    # Sums are exact here, means are rounded once by either way.
                    allowed = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0  # noqa: B023
                    if found.dtype != expected.dtype or off > (allowed if op == "AVG" else 0):  # noqa: B023
                        wrong.setdefault(f"{op} {dtype}", []).append(name)  # noqa: B023

                whole = [values(i, dtype, n * COUNT) for i in range(n)]
                expected = expected_of(op, whole)
                x = whole[rank].clone()
                dist.all_reduce(x, reduce_op)
                check("all_reduce", x, expected)
                x = whole[rank].clone()
                dist.reduce(x, dst=1, op=reduce_op)
                if rank == 1:
                    check("reduce", x, expected)
                mine = expected.chunk(n)[rank]
                x = torch.zeros(COUNT).to(dtype)
                dist.reduce_scatter_tensor(x, whole[rank], reduce_op)
                check("reduce_scatter_tensor", x, mine)
                x = torch.zeros(COUNT).to(dtype)
                dist.reduce_scatter(x, list(whole[rank].chunk(n)), reduce_op)
                check("reduce_scatter", x, mine)
        return wrong

    assert run_with_group(work, 3) == [{}] * 3


@pytest.mark.parametrize("factor", [0.5, "tensor"])
def test_premul_sum_multiplies_each_rank_s_share(factor):
    def work() -> list[str]:
        n, rank, wrong = dist.get_world_size(), dist.get_rank(), []
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            by = torch.tensor([0.5], dtype=dtype) if factor == "tensor" else factor
            op = dist._make_nccl_premul_sum(by)
            x = values(rank, dtype, n * COUNT)
            expected = sum(values(i, torch.float64, n * COUNT) for i in range(n)) * 0.5
            part = torch.zeros(COUNT, dtype=dtype)
            dist.reduce_scatter_tensor(part, x, op)
            dist.all_reduce(x, op)
            if not torch.equal(x.double(), expected):
                wrong.append(f"all_reduce {dtype}")
            if not torch.equal(part.double(), expected.chunk(n)[rank]):
                wrong.append(f"reduce_scatter {dtype}")
        return wrong

    assert run_with_group(work, 2) == [[], []]
