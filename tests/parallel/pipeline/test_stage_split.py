"""How blocks are split into stages, and batches into microbatches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.microbatches import split_batch

pytestmark = [pytest.mark.pure, pytest.mark.torch]


def brute_force(costs: list[float], stages: int, before: float, after: float) -> float:
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        sums[0] += before
        sums[-1] += after
        best = min(best, max(sums))
    return best


def test_split_is_as_good_as_all_splits():
    generator = random.Random(7)
    for blocks in range(1, 13):
        for stages in range(1, min(4, blocks) + 1):
            for _ in range(5):
                costs = [generator.choice([0.0, 1.0, generator.random()]) for _ in range(blocks)]
                before, after = generator.choice([(0.0, 0.0), (0.7, 1.3)])
                bounds = pipeline.split(costs, stages, before, after)
                assert len(bounds) == stages + 1 and bounds[0] == 0 and bounds[-1] == blocks
                assert all(a < b for a, b in itertools.pairwise(bounds))
                sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
                sums[0] += before
                sums[-1] += after
                expected = brute_force(costs, stages, before, after)
                assert max(sums) == pytest.approx(expected, abs=1e-12), (costs, stages)


def test_split_of_too_few_blocks_is_refused():
    with pytest.raises(UsageError, match=r"cannot split 2 blocks into 3 stages: expected 1\.\.2"):
        pipeline.split([1, 1], 3)
    with pytest.raises(UsageError, match="the cost of a block is nan"):
        pipeline.split([1, float("nan")], 2)


def test_batch_is_split_as_even_as_it_can_be():
    x = torch.arange(7)
    parts = split_batch({"x": x, "flag": True, "pair": (x, None)}, 3)
    assert [len(part["x"]) for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), x)
    assert all(part["flag"] is True for part in parts)
    assert len(split_batch(x, 10)) == 7
    assert split_batch(x[:0], 2) == [] and split_batch(None, 2) is None
    with pytest.raises(UsageError, match=r"have \[5, 7\] samples"):
        split_batch((x, x[:5]), 2)
    with pytest.raises(UsageError, match="2 microbatches are given in a list, but microbatches"):
        split_batch([x, x], 3)
