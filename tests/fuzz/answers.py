"""What ranks bring to a collective of a random program, and what it must give them, in NumPy.

Input values are small whole numbers, of which every sum and product is exact in its type: a result
is right to the bit or wrong, whatever the order of the reduction. Only an average is rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from collective_oracles import INFO, ORACLES
from comm_cases import reduced
from programs import DTYPES, Collective

PERIOD = 4099  # prime: a block in the wrong place is seen
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
# A bool is a number of one bit.
LOGICAL = {**BITWISE, "sum": np.bitwise_or, "max": np.bitwise_or, "prod": np.bitwise_and,
           "min": np.bitwise_and}  # fmt: skip
# Up to this magnitude every whole number is exact; further up for all other types.
EXACT = {"f8_e5m2": 8, "f8_e4m3": 16, "bf16": 256, "f16": 2048}
LARGEST = 300


def factor_of(op: Collective, rank: int) -> float:
    """Of premul on a rank."""
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
    """What premul adds up: each rank's values times its factor; integers wrap around."""
    by_rank = (-1,) + (1,) * (values.ndim - 1)
    factors = np.array([factor_of(op, rank) for rank in range(len(values))]).reshape(by_rank)
    if values.dtype.kind in "iu":
        return values * factors.astype(np.int64).astype(values.dtype)
    return (values * factors.astype(values.dtype)).astype(values.dtype)


def bitwise_of(op: Collective) -> np.ufunc | None:
    if not INFO[op.name].has_op:
        return None
    return (LOGICAL if op.dtype == "bool" else BITWISE).get(op.op)


def oracle(op: Collective, values: np.ndarray, rank: int, root: int) -> np.ndarray | None:
    if op.op == "premul":
        return oracle(replace(op, op="sum"), scaled(op, values), rank, root)
    if combine := bitwise_of(op):
        if op.name in ("scan", "exscan"):
            end = rank + (op.name == "scan")
            return combine.reduce(values[:end]) if end else None
        total = combine.reduce(values)
        if op.name == "reduce":
            return total if rank == root else None
        return total.reshape(len(values), -1)[rank] if op.name == "reduce_scatter" else total
    if values.dtype.kind == "c" and INFO[op.name].has_op:
        real, imaginary = (oracle(op, part, rank, root) for part in (values.real, values.imag))
        return None if real is None else real + 1j * imaginary
    return ORACLES[op.name].expected(values, rank, root, op.op)


def compare(op: Collective, got: Any, expected: np.ndarray) -> None:
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    dtype = np.dtype(DTYPES[op.dtype])
    assert got.dtype == dtype, f"dtype {got.dtype}"
    if op.op == "avg" and dtype.kind not in "iu" and INFO[op.name].has_op:
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
        total = oracle_of_sum(op, values)
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


def oracle_of_sum(op: Collective, values: np.ndarray) -> np.ndarray:
    if op.op == "premul":
        return oracle_of_sum(replace(op, op="sum"), scaled(op, values))
    if combine := bitwise_of(op):
        return combine.reduce(values)
    if values.dtype.kind == "c":
        return reduced(values.real, op.op) + 1j * reduced(values.imag, op.op)
    return reduced(values, op.op)
