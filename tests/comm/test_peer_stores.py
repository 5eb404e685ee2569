"""Slots are written through the caches or past them; the bytes are the same."""

from __future__ import annotations

import numpy as np
import pytest

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks

ALGORITHMS = ("ring/simple", "tree/simple", "one_shot/simple", "two_shot/simple")
COUNT = 300_007  # of f32: several slots, and a part of a line at the end


def reduced(comm: pycoll.Communicator) -> list[str]:
    """The algorithms with a wrong result."""
    comm.register_after = 0  # registered arrays have no slots
    ranks = [np.random.default_rng(rank).random(COUNT, np.float32) for rank in range(comm.size)]
    wrong = []
    for algorithm in ALGORITHMS:
        for _ in range(3):
            out = comm.all_reduce(ranks[comm.rank].copy(), algorithm=algorithm)
            if not np.allclose(out, sum(ranks), rtol=1e-6):
                wrong.append(algorithm)
    parts = comm.all_gather(ranks[comm.rank], algorithm="ring/simple")
    return wrong if np.array_equal(parts.ravel(), np.concatenate(ranks)) else [*wrong, "gather"]


@pytest.mark.parametrize("stores", ["cached", "memory", "measured"])
def test_collectives_are_right_with_each_way_to_write(stores, monkeypatch):
    monkeypatch.setenv("PYCOLL_PEER_STORES", stores)
    assert run_ranks(reduced, 3) == [[]] * 3
