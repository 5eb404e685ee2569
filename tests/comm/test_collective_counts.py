"""Collectives whose blocks differ in size: counts of rows, zero among them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from comm_cases import inputs
from worlds import Comm, on_ranks

from pycoll import CollectiveMismatchError
from pycoll.bench.arithmetic import reduced

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

ROW = (3,)
each_world = on_ranks(2, processes=[3, 5], threads=[1, 4, 8])

# Rows of rank r's block of n.
PATTERNS: dict[str, Callable[[int, int], int]] = {
    "all_zero": lambda r, n: 0,
    "equal": lambda r, n: 4,
    "only_the_first": lambda r, n: 5 if r == 0 else 0,
    "only_the_last": lambda r, n: 1 if r == n - 1 else 0,
    "rising": lambda r, n: r,
    "mixed": lambda r, n: (7 * r + 3) % 5,
    "larger_than_a_slot": lambda r, n: 11_000 + r if r % 2 == 0 else 1,
}


def all_counts(n: int) -> list[list[int]]:
    return [[pattern(r, n) for r in range(n)] for pattern in PATTERNS.values()]


def rows_of(n: int, rows: int, seed: int = 0) -> np.ndarray:
    return inputs(n, rows * ROW[0], seed=seed).reshape(n, rows, *ROW)


@each_world
def test_all_gather_with_counts_equals_numpy(comm):
    n, rank = comm.size, comm.rank
    for counts in all_counts(n):
        values = [rows_of(n, count)[r] for r, count in enumerate(counts)]
        everything = np.concatenate(values)
        for given in (counts, tuple(counts), np.array(counts)):
            result = comm.all_gather(values[rank].copy(), counts=given)
            assert result.shape == everything.shape
            np.testing.assert_array_equal(result, everything, str(counts))
        out = np.full(everything.shape, np.nan, np.float32)
        begin = sum(counts[:rank])
        mine = out[begin : begin + counts[rank]]
        mine[...] = values[rank]
        assert comm.all_gather(mine, out, counts=counts) is out  # in place
        np.testing.assert_array_equal(out, everything, str(counts))
        started = comm.all_gather(values[rank].copy(), counts=counts, async_op=True)
        np.testing.assert_array_equal(started.wait(), everything, str(counts))


@each_world
def test_reduce_scatter_with_counts_equals_numpy(comm):
    n, rank = comm.size, comm.rank
    for counts in all_counts(n):
        begin = sum(counts[:rank])
        mine = slice(begin, begin + counts[rank])
        for op in ("sum", "max", "avg"):
            values = rows_of(n, sum(counts))
            expected = reduced(values, op)[mine]
            bound = n * 2.0**-23 * np.abs(values).sum(axis=0)[mine]
            x = values[rank].copy()
            results = [
                comm.reduce_scatter(x, op, counts=counts),
                comm.reduce_scatter(x, op, counts=counts, async_op=True).wait(),
                comm.reduce_scatter(x, op, np.zeros(counts[rank] * ROW[0], "f"), counts=counts),
                comm.reduce_scatter(x, op, x[mine], counts=counts),  # the last: in place
            ]
            for result in results:
                result = result.reshape(expected.shape)
                assert (np.abs(result - expected) <= bound).all(), (counts, op)


def exchanges(n: int) -> list[np.ndarray]:
    """Matrices of how many rows each rank (row) sends to each (column)."""
    matrices = [np.array([[pattern(s + d, n) for d in range(n)] for s in range(n)])
                for pattern in PATTERNS.values()]  # fmt: skip
    return [*matrices, np.diag(range(n)), np.triu(np.full((n, n), 3))]


@each_world
def test_all_to_all_with_counts_equals_numpy(comm):
    n, rank = comm.size, comm.rank
    for counts in exchanges(n):
        values = [rows_of(n, int(counts[r].sum()))[r] for r in range(n)]
        ends = counts.cumsum(axis=1)
        expected = np.concatenate(
            [values[s][ends[s, rank] - counts[s, rank] : ends[s, rank]] for s in range(n)]
        )
        send, recv = counts[rank].tolist(), counts[:, rank].tolist()
        x = values[rank].copy()
        out = np.full(expected.shape, np.nan, np.float32)
        assert comm.all_to_all(x, out, send, recv) is out
        results = [
            out,
            comm.all_to_all(x, None, send, recv),
            comm.all_to_all(x, send_counts=send),  # the ranks tell each other
            comm.all_to_all(x, None, send, recv, async_op=True).wait(),
            comm.all_to_all(x, None, send, async_op=True).wait(),
        ]
        for result in results:
            assert result.shape == expected.shape
            np.testing.assert_array_equal(result, expected, str(counts))
        np.testing.assert_array_equal(x, values[rank])


MISTAKES: dict[str, Callable[[Comm], object]] = {
    "all_gather": lambda c: c.all_gather(np.ones(2), counts=[2, 2, 2 if c.rank != 1 else 3]),
    "reduce_scatter": lambda c: c.reduce_scatter(
        np.ones(6), counts=[2, 2, 2] if c.rank != 1 else [3, 2, 1]
    ),
    # Rank 1 expects three rows of rank 2, which sends two.
    "all_to_all": lambda c: c.all_to_all(
        np.ones(6), None, [2, 2, 2], [2, 2, 3 if c.rank == 1 else 2]
    ),
    "all_to_all_without": lambda c: c.all_to_all(
        np.ones(6), send_counts=None if c.rank == 1 else [2, 2, 2]
    ),
}


@on_ranks(3)
def test_counts_that_differ_raise_mismatch_on_every_rank(comm):
    for name, mistake in MISTAKES.items():
        part = comm.split(0)
        with pytest.raises(CollectiveMismatchError, match=name.removesuffix("_without")):
            mistake(part)
            part.barrier()  # where a rank that waits for no other raises
        comm.barrier()
