"""Inputs of the collectives of a random program, and their results, in NumPy.

Input values are small whole numbers, whose sums and products are exact in every type: a result is
right to the bit or wrong, in any order of the reduction. Only an average is rounded.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from programs import DTYPES, Collective

from pycoll.bench.arithmetic import EXACT, reduced
from pycoll.bench.oracle import COLLECTIVES

PERIOD = 4099  # prime: a block in the wrong place is seen
LARGEST = 300


def factor_of(op: Collective, rank: int) -> float:
    """The factor of premul on a rank."""
    factors = [1, 2, 3] if op.dtype.startswith("u") else [1, -1, 2, 3]
    factors = [1, -1] if op.dtype == "f8_e5m2" else factors
    return float(factors[(op.seed + rank) % len(factors)])


def values_of(op: Collective, n: int, shape: tuple[int, ...]) -> np.ndarray:
    """The inputs of all ranks: exact under the operator, periodic with a prime."""
    dtype = np.dtype(DTYPES[op.dtype])
    rng = np.random.default_rng([op.seed, n])
    if op.dtype == "bool":
        base = rng.integers(0, 2, (n, PERIOD)).astype(dtype)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        base = rng.integers(limits.min, limits.max, (n, PERIOD), dtype, endpoint=True)
    elif op.op == "prod":
        base = rng.choice([1, 2, -1], (n, PERIOD)).astype(dtype)
    else:
        scale = max(abs(factor_of(op, rank)) for rank in range(n)) if op.op == "premul" else 1
        largest = min(LARGEST, int(EXACT.get(op.dtype, 1 << 24) / (n * scale)))
        base = rng.integers(-largest, largest, (n, PERIOD), endpoint=True).astype(dtype)
    count = int(np.prod(shape))
    return np.stack([np.resize(row, count) for row in base]).reshape(n, *shape)


def scaled(op: Collective, values: np.ndarray) -> np.ndarray:
    """The values times each rank's factor, which premul adds up; integers wrap around."""
    by_rank = (-1,) + (1,) * (values.ndim - 1)
    factors = np.array([factor_of(op, rank) for rank in range(len(values))]).reshape(by_rank)
    if values.dtype.kind in "iu":
        return values * factors.astype(np.int64).astype(values.dtype)
    return (values * factors.astype(values.dtype)).astype(values.dtype)


def oracle(op: Collective, values: np.ndarray, rank: int, root: int) -> np.ndarray | None:
    if op.op == "premul":
        values = scaled(op, values)
    return COLLECTIVES[op.name].expected(values, rank, root, op.op)


def compare(op: Collective, got: Any, expected: np.ndarray) -> None:
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    dtype = np.dtype(DTYPES[op.dtype])
    assert got.dtype == dtype, f"dtype {got.dtype}"
    if op.op == "avg" and dtype.kind not in "iu" and COLLECTIVES[op.name].has_op:
        wide = np.complex128 if dtype.kind == "c" else np.float64
        exact, eps = expected.astype(wide), float(ml_dtypes.finfo(dtype).eps)
        right = np.abs(got.astype(wide) - exact) <= 4 * eps * np.abs(exact)
    else:
        right = got == expected
    if not right.all():
        where = np.argwhere(~right)
        first = tuple(where[0])
        raise AssertionError(
            f"{len(where)} of {got.size} elements differ, the first at {first}: "
            f"{got[first]}, expected {expected[first]}"
        )


def counts_of(op: Collective, n: int) -> list[int]:
    rows = op.nbytes // np.dtype(DTYPES[op.dtype]).itemsize
    return [rows * ((op.seed + 3 * rank) % 4) // 2 for rank in range(n)]


def with_counts(op: Collective, n: int, rank: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Input, result and the counts to pass, of blocks that differ in size."""
    counts = counts_of(op, n)
    ends = np.cumsum(counts)
    if op.name == "all_gather":
        values = [values_of(op, n, (count,))[r] for r, count in enumerate(counts)]
        return values[rank], np.concatenate(values), {"counts": counts}
    if op.name == "reduce_scatter":
        values = values_of(op, n, (sum(counts),))
        total = reduced(scaled(op, values) if op.op == "premul" else values, op.op)
        mine = slice(ends[rank] - counts[rank], ends[rank])
        return values[rank], total[mine], {"counts": counts}
    # Rank s sends counts[(s + d) % n] rows to rank d.
    table = [[counts[(s + d) % n] for d in range(n)] for s in range(n)]
    values = values_of(op, n, (sum(counts),))
    pieces = []
    for s in range(n):
        begin = sum(table[s][:rank])
        pieces.append(values[s][begin : begin + table[s][rank]])
    more: dict[str, Any] = {"send_counts": table[rank]}
    if op.seed % 2:
        more["recv_counts"] = [table[s][rank] for s in range(n)]
    return values[rank], np.concatenate(pieces), more
