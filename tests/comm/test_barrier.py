"""barrier: nobody leaves before everybody has entered."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from comm_cases import both

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks

NUM_BARRIERS = 30


def enter_at_random_times(comm: pycoll.Communicator, seed: int) -> list[tuple[float, float]]:
    delays = random.Random(seed * 100 + comm.rank)
    times = []
    for _ in range(NUM_BARRIERS):
        time.sleep(delays.choice([0.0, 0.0, 0.001, 0.005]))
        entered = time.monotonic()  # the same clock in all processes of a host
        comm.barrier()
        times.append((entered, time.monotonic()))
    return times


@both
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_barrier_nobody_leaves_before_the_last_has_entered(n, threads):
    seed = random.randrange(1 << 30)
    times = run_ranks(enter_at_random_times, n, seed, threads=threads)
    for i in range(NUM_BARRIERS):
        last_entry = max(rank_times[i][0] for rank_times in times)
        first_exit = min(rank_times[i][1] for rank_times in times)
        assert first_exit >= last_entry, f"barrier {i} with seed {seed}"


@both
def test_barrier_between_other_collectives_keeps_their_order(threads):
    def mixed(comm: pycoll.Communicator) -> None:
        for i in range(50):
            x = np.full(7, comm.rank + i)
            comm.all_reduce(x)
            comm.barrier()
            y = np.full(3, comm.rank)
            comm.broadcast(y, root=i % comm.size)
            assert (x == 3 + 3 * i).all()
            assert (y == i % comm.size).all()

    run_ranks(mixed, 3, threads=threads)
