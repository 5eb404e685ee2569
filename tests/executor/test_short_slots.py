"""Ranks that share a core: short messages to and from a root run ahead of their readers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS = 3
NUM_SHORT_SLOTS = 28
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


def run(comm: pycoll.Communicator, call, readers: list[int]) -> list[int]:
    """Which calls had wrong results. Readers begin when the writers have made 28 calls."""
    reads = comm.rank in readers
    if reads:
        for writer in set(range(NUM_RANKS)) - set(readers):
            comm.recv(np.empty(1), writer)
    wrong = []
    for value, nbytes in enumerate(SIZES):
        result = call(comm, nbytes, value)
        if reads and not (result == value).all():
            wrong.append(value)
        if value == NUM_SHORT_SLOTS - 1 and not reads:
            for reader in readers:
                comm.send(np.zeros(1), reader)
    return wrong


@pytest.mark.parametrize(
    ("call", "readers"),
    [(broadcast, [1, 2]), (scatter, [1, 2]), (gather, [0])],
    ids=["broadcast", "scatter", "gather"],
)
def test_writers_fill_the_short_slots_of_late_readers(one_core, call, readers):
    # With fewer slots, writers would wait for readers, which wait for the writers' messages.
    assert run_ranks(run, NUM_RANKS, call, readers, timeout_s=20) == [[]] * NUM_RANKS
