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


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="no shards"):
        pc.map_reduce(len, [])
    with pytest.raises(UsageError, match="op is 'mean', expected one of sum, prod, min, max"):
        pc.map_reduce(len, [[1]], "mean")
    with pytest.raises(UsageError, match="the function gave a str, expected an array"):
        pc.map_reduce(str, [1])
