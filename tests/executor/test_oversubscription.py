"""More ranks than cores: waiting ranks must leave the cores to those that work."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import pycoll
from pycoll import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timing]

NUM_RANKS = 8
SIZES_BYTES = [4 << (2 * i) for i in range(8)]  # 4 B to 64 KiB
NUM_REPEATS = 25


def time_all_reduces(comm: pycoll.Communicator) -> dict[int, float]:
    """Median time of a call, seconds, by bytes."""
    medians = {}
    for nbytes in SIZES_BYTES:
        times = []
        x = np.ones(nbytes // 4, np.float32)
        for _ in range(NUM_REPEATS):
            x[:] = 1
            start = time.perf_counter()
            comm.all_reduce(x)
            times.append(time.perf_counter() - start)
            assert (x == comm.size).all()
        medians[nbytes] = float(np.median(times))
    return medians


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_eight_ranks_on_two_cores_do_not_collapse(threads):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])  # for this process and the ranks that it starts
    try:
        start = time.monotonic()
        medians = run_ranks(time_all_reduces, NUM_RANKS, threads=threads, timeout_s=60)
        took_s = time.monotonic() - start
    finally:
        os.sched_setaffinity(0, cores)
    slowest = {nbytes: max(m[nbytes] for m in medians) for nbytes in SIZES_BYTES}
    lines = (f"{nbytes:>6} B {slowest[nbytes] * 1e6:>9.0f} us" for nbytes in SIZES_BYTES)
    print(f"\n{NUM_RANKS} ranks, {took_s:.2f} s:", *lines, sep="\n")
    # A collapse is one scheduler slice (milliseconds) for every one of a call's dozens of messages.
    assert took_s < 20
    assert max(slowest.values()) < 0.05
