"""map_reduce: the result of one process, to the bit, on any number of ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc

SHARDS = [np.random.default_rng(i).normal(size=(5, 3)).astype(np.float32) for i in range(7)]
MERGE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def mean_and_extent(shard):
    """A number, an array and a tensor."""
    return {"sum": float(shard.sum()), "columns": (shard.sum(0), torch.from_numpy(shard[0] ** 2))}


@pytest.mark.parametrize("n", [1, 3, 4])
def test_result_is_that_of_one_process(n):
    def work(comm):
        return {
            op: [
                pc.map_reduce(mean_and_extent, SHARDS[:count], op, comm=comm)
                for count in (1, 2, len(SHARDS))
            ]
            for op in MERGE
        }

    for outcome in run_ranks(work, n, threads=True):
        for op, merge in MERGE.items():
            for count, found in zip((1, 2, len(SHARDS)), outcome[op], strict=True):
                each = [mean_and_extent(shard) for shard in SHARDS[:count]]
                assert found["sum"] == functools.reduce(merge, [m["sum"] for m in each])
                columns = functools.reduce(merge, [m["columns"][0] for m in each])
                assert np.array_equal(found["columns"][0], columns)
                squares = functools.reduce(merge, [m["columns"][1].numpy() for m in each])
                assert isinstance(found["columns"][1], torch.Tensor)
                assert np.array_equal(found["columns"][1].numpy(), squares)


def test_merging_in_any_order_is_near():
    def work(comm):
        given = np.ones(3)
        total = pc.map_reduce(lambda i: given * i, range(10), comm=comm, deterministic=False)
        fewer = pc.map_reduce(lambda i: i, range(2), comm=comm, deterministic=False)
        return total, fewer, given

    for total, fewer, given in run_ranks(work, 3, threads=True):
        assert np.array_equal(total, np.full(3, 45.0)) and fewer == 1
        assert np.array_equal(given, np.ones(3))


def test_merge_of_ones_own_is_called_in_the_order_of_the_shards():
    """Affine maps x -> a x + b, whose composition is not commutative."""

    def compose(first, then):
        return np.array([then[0] * first[0], then[0] * first[1] + then[1]])

    def work(comm):
        maps = [np.array([i + 2.0, 3.0 * i]) for i in range(7)]
        return [pc.map_reduce(lambda i: maps[i], range(n), compose, comm=comm) for n in (1, 2, 7)]

    expected = []
    for n in (1, 2, 7):
        found = np.array([1.0, 0.0])
        for i in range(n):
            found = np.array([(i + 2.0) * found[0], (i + 2.0) * found[1] + 3.0 * i])
        expected.append(found)
    for outcome in run_ranks(work, 3, threads=True):
        assert all(np.array_equal(a, b) for a, b in zip(outcome, expected, strict=True))


def test_mistakes_are_named():
    with pytest.raises(UsageError, match=r"op made float64 of shape \(4,\), expected float64 of"):
        pc.map_reduce(lambda i: np.ones(2), range(2), lambda a, b: np.concatenate([a, b]))
    with pytest.raises(UsageError, match="a function as op merges in the order"):
        pc.map_reduce(lambda i: i, range(2), lambda a, b: a, deterministic=False)
    with pytest.raises(UsageError, match="no shards"):
        pc.map_reduce(len, [])
    with pytest.raises(UsageError, match="op is 'mean', expected one of sum, prod, min, max"):
        pc.map_reduce(len, [[1]], "mean")
    with pytest.raises(UsageError, match="the function gave a str, expected an array"):
        pc.map_reduce(str, [1])
