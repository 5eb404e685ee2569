"""Every cell of the table dtypes x ops through every reducing collective, between ranks."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import on_ranks

import pycoll
from pycoll import UsageError, _core

sys.path.insert(0, str(Path(__file__).parents[1] / "reduce"))
from pycoll.bench.arithmetic import (
    CELLS,
    DTYPES,
    KIND,
    OPS,
    STORAGE,
    Array,
    oracle,
    random_values,
    scaled,
)

pytestmark = pytest.mark.ranks

N = 3
COUNT = 300  # divisible by N
REDUCING = [row.name for row in _core.collectives() if row.has_op]
OTHERS = ["broadcast", "all_gather", "all_to_all", "gather", "scatter", "neighbor_exchange"]
FACTORS = [2.0, 3.0, 5.0]


def array_of(stored: Array, dtype: str) -> Array:
    """An array of the dtype itself: of NumPy, or of ml_dtypes for small floats."""
    names = {"bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2"}
    if dtype == "bool":
        return stored.view(np.bool_)
    if dtype in names:
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="small floats for NumPy")
        return stored.view(getattr(ml_dtypes, names[dtype]))
    return stored


def test_collectives_that_take_an_op_are_known() -> None:
    assert set(REDUCING) == {"all_reduce", "reduce_scatter", "reduce", "scan", "exscan"}


def expected_of(name: str, srcs: list[Array], dtype: str, op: str, rank: int) -> Array | None:
    """None: nothing to compare with."""
    divisor = N if op == "avg" else 1
    if name in ("scan", "exscan"):
        srcs = srcs[: rank + (name == "scan")]
        return oracle(srcs, dtype, op) if srcs else None
    whole = oracle(srcs, dtype, op, divisor)
    if name == "reduce" and rank != 0:
        return None
    return whole.reshape(N, -1)[rank] if name == "reduce_scatter" else whole


@on_ranks(threads=[N], needs="ml_dtypes")
def test_reducing_collective_of_every_cell_equals_oracle(comm):
    for name, (dtype, op) in itertools.product(REDUCING, CELLS):
        if op == "avg" and name in ("scan", "exscan"):
            continue
        rng = np.random.default_rng(DTYPES.index(dtype))
        srcs = values = [random_values(rng, dtype, COUNT) for _ in range(N)]
        given: object = op
        if op == "premul":
            given = pycoll.premul(FACTORS[comm.rank])
            srcs = [scaled(v, dtype, f) for v, f in zip(values, FACTORS, strict=True)]
        x = array_of(values[comm.rank].copy(), dtype)
        out = np.zeros_like(x)
        extra = {} if name != "reduce_scatter" else {"out": out[: COUNT // N]}
        if name != "reduce_scatter" and (name != "reduce" or comm.rank == 0):
            extra = {"out": out}
        result = getattr(comm, name)(x, op=given, **extra)
        where = f"{name} {dtype} {op}"
        np.testing.assert_array_equal(
            x.view(np.uint8), values[comm.rank].view(np.uint8), err_msg=where
        )
        expected = expected_of(name, srcs, dtype, op, comm.rank)
        if expected is not None and any_order_is_right(dtype, op):
            np.testing.assert_array_equal(
                result.view(np.uint8), expected.view(np.uint8), err_msg=where
            )


def any_order_is_right(dtype: str, op: str) -> bool:
    """A schedule may take another order than rank by rank, which rounding sees."""
    return op in ("min", "max") or KIND[dtype] in ("int", "uint", "bool")


@on_ranks(processes=[N])
def test_all_reduce_premul_of_floats_in_place_and_async(comm):
    for x, expected in [
        (np.full(1000, comm.rank + 1.0), 2 * 1 + 3 * 2 + 5 * 3.0),
        (np.full(1000, 1 + 1j), (2 + 3 + 5) * (1 + 1j)),
        (np.full(100_000, comm.rank + 1, np.float32), 2 * 1 + 3 * 2 + 5 * 3.0),
    ]:
        work = comm.all_reduce(x, op=pycoll.premul(FACTORS[comm.rank]), async_op=True)
        assert (work.wait() == expected).all()
        assert (x == expected).all()
        comm.all_reduce(x, op=pycoll.premul(1 / 3))
        np.testing.assert_allclose(x, expected, rtol=1e-6)


@on_ranks(threads=[N], needs="ml_dtypes")
def test_impossible_cell_raises_before_the_peers_notice(comm):
    for name in REDUCING:
        for dtype in DTYPES:
            x = array_of(np.zeros(COUNT, STORAGE[dtype]), dtype)
            for op in [op for op in OPS if (dtype, op) not in CELLS]:
                given = pycoll.premul(2) if op == "premul" else op
                if comm.rank == 1:
                    text = f"op {op} .*dtype {dtype}: |has no op avg"
                    with pytest.raises(UsageError, match=text):
                        getattr(comm, name)(x, op=given)
    with pytest.raises(UsageError, match=r"premul needs a factor: .*premul\(0.5\)"):
        comm.all_reduce(np.ones(3), op="premul")
    with pytest.raises(UsageError, match="whole number that i32 holds, got 0.5"):
        comm.all_reduce(np.ones(3, np.int32), op=pycoll.premul(0.5))
    comm.barrier()


ELEMENTS = [
    *(np.dtype(STORAGE[d]) for d in DTYPES),
    *map(np.dtype, ["V3", "V100000", "M8[s]", "U5"]),
]


@on_ranks(threads=[N])
def test_copying_collective_takes_elements_of_any_type(comm):
    for name, dtype in itertools.product(OTHERS, ELEMENTS):
        rows = 2 if name == "neighbor_exchange" else 2 * N
        everyone = [
            np.random.default_rng(r).integers(0, 256, (rows, dtype.itemsize), np.uint8)
            for r in range(N)
        ]
        x = everyone[comm.rank].copy().view(dtype).reshape(rows)
        result = getattr(comm, name)(x)
        expected = {
            "broadcast": everyone[0],
            "all_gather": np.concatenate(everyone),
            "gather": np.concatenate(everyone),
            "scatter": everyone[0][2 * comm.rank :][:2],
            "all_to_all": np.concatenate([e[2 * comm.rank :][:2] for e in everyone]),
            "neighbor_exchange": np.stack(
                [everyone[comm.rank - 1][1], everyone[(comm.rank + 1) % N][0]]
            ),
        }[name]
        if name == "gather" and comm.rank != 0:
            continue
        assert result.dtype == dtype
        np.testing.assert_array_equal(
            result.view(np.uint8), expected.reshape(-1), err_msg=f"{name} {dtype}"
        )


@on_ranks(threads=[N])
def test_copies_by_counts_take_elements_of_any_type(comm):
    counts = [1, 3, 2]
    for dtype in map(np.dtype, ["V3", "M8[s]", "V70000"]):
        x = np.full((counts[comm.rank], dtype.itemsize), comm.rank, np.uint8)
        got = comm.all_gather(x.view(dtype).reshape(-1), counts=counts)
        assert got.view(np.uint8).reshape(6, -1)[:, 0].tolist() == [0, 1, 1, 1, 2, 2]
        sent = np.full((6, dtype.itemsize), comm.rank, np.uint8).view(dtype).reshape(-1)
        got = comm.all_to_all(sent, send_counts=counts)
        mine = counts[comm.rank]
        rows = got.view(np.uint8).reshape(3 * mine, -1)[:, 0]
        assert rows.tolist() == [r for r in range(N) for _ in range(mine)]


@pytest.mark.torch
@on_ranks(threads=[N], needs="torch")
def test_torch_tensors_of_every_dtype(comm):
    import torch

    names = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
    )
    names += " complex64 complex128 float8_e4m3fn float8_e5m2"
    for name in names.split():
        x = torch.ones(5).to(getattr(torch, name))
        comm.all_reduce(x)
        one_or_three = 1 if name == "bool" else N
        assert (x.to(torch.complex64) == one_or_three).all(), name
    for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex32"):
        source = torch.arange(1, 5, dtype=torch.uint8).repeat(4)
        dtype = getattr(torch, name)
        x = source.view(dtype) if comm.rank == 0 else torch.zeros_like(source).view(dtype)
        comm.broadcast(x)
        assert torch.equal(x.view(torch.uint8), source), name
        with pytest.raises(UsageError, match=f"dtype torch.{name}, which pycoll can copy"):
            comm.all_reduce(x)
