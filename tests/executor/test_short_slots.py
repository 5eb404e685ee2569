"""Ranks that share a core: short messages to and from a root run ahead of their readers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS = 3
NUM_SHORT_SLOTS = 28
LATE_S = 0.2
# Bytes of a rank's block: as many short ones as fit, then others between short ones.
SIZES = [8] * NUM_SHORT_SLOTS + [512, 8, 640, 4096, 8, 2048, 512] + [8] * (2 * NUM_SHORT_SLOTS)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Has this process and those that it starts use one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])
    yield
    os.sched_setaffinity(0, cores)


def broadcast(comm: pycoll.Communicator, nbytes: int, value: int) -> np.ndarray:
    return comm.broadcast(np.full(nbytes // 8, float(value) if comm.rank == 0 else -1.0))


def scatter(comm: pycoll.Communicator, nbytes: int, value: int) -> np.ndarray:
    return comm.scatter(
        np.full(NUM_RANKS * nbytes // 8, float(value)) if comm.rank == 0 else None,
        out=np.empty(nbytes // 8),
    )


def gather(comm: pycoll.Communicator, nbytes: int, value: int) -> np.ndarray:
    return comm.gather(np.full(nbytes // 8, float(value)))


def run(comm: pycoll.Communicator, call, readers: list[int]) -> tuple[float, list[int]]:
    """When this rank had made its first 28 calls, or began to read, and which had wrong results."""
    comm.barrier()
    reads = comm.rank in readers
    if reads:
        time.sleep(LATE_S)
    ready_s = time.monotonic()
    wrong = []
    for value, nbytes in enumerate(SIZES):
        result = call(comm, nbytes, value)
        if reads and not (result == value).all():
            wrong.append(value)
        if value == NUM_SHORT_SLOTS - 1 and not reads:
            ready_s = time.monotonic()
    return ready_s, wrong


@pytest.mark.parametrize(
    ("call", "readers"),
    [(broadcast, [1, 2]), (scatter, [1, 2]), (gather, [0])],
    ids=["broadcast", "scatter", "gather"],
)
def test_writers_fill_the_short_slots_of_late_readers(one_core, call, readers):
    results = run_ranks(run, NUM_RANKS, call, readers, timeout_s=20)
    assert [wrong for _, wrong in results] == [[]] * NUM_RANKS
    began = min(results[rank][0] for rank in readers)
    assert max(results[rank][0] for rank in range(NUM_RANKS) if rank not in readers) < began
