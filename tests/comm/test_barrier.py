"""barrier: no rank leaves before every rank has entered."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from worlds import Comm, on_ranks, run

pytestmark = pytest.mark.ranks

NUM_BARRIERS = 30


def enter_at_random_times(comm: Comm, seed: int) -> list[tuple[float, float]]:
    delays = random.Random(seed * 100 + comm.rank)
    times = []
    for _ in range(NUM_BARRIERS):
        time.sleep(delays.choice([0.0, 0.0, 0.001, 0.005]))
        entered = time.monotonic()  # the same clock in all processes of a host
        comm.barrier()
        times.append((entered, time.monotonic()))
    return times


def test_barrier_no_rank_leaves_before_the_last_has_entered():
    for kind, sizes in {"processes": (1, 2, 3, 5, 8), "threads": (2, 4, 8)}.items():
        for n in sizes:
            seed = random.randrange(1 << 30)
            times = run(enter_at_random_times, n, seed, kind=kind)
            for i in range(NUM_BARRIERS):
                last_entry = max(rank_times[i][0] for rank_times in times)
                first_exit = min(rank_times[i][1] for rank_times in times)
                assert first_exit >= last_entry, f"barrier {i} of {n} {kind} with seed {seed}"


@on_ranks(3)
def test_barrier_between_other_collectives_keeps_their_order(comm):
    for i in range(50):
        x = np.full(7, comm.rank + i)
        comm.all_reduce(x)
        comm.barrier()
        y = np.full(3, comm.rank)
        comm.broadcast(y, root=i % comm.size)
        assert (x == 3 + 3 * i).all()
        assert (y == i % comm.size).all()
