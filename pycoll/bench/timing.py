"""The one way in which calls are timed: blocks of back-to-back calls behind a barrier.

A block has as many calls as take at least BLOCK_S, found after a warm-up by blocks that grow. The
time of a call is that of the block on the slowest rank, divided by its calls. benchmarks/perf does
the same in C++. This module needs Python's standard library alone.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

BLOCK_S = 2e-3  # the clock, the barrier and the first call after it do not matter
MOST_CALLS = 1 << 20
WARMUP = 10  # calls; more than the uses after which an array is registered
NUM_BLOCKS = 40
FEWEST_BLOCKS = 5  # of calls that are so long that NUM_BLOCKS would pass the limit of time

Call = Callable[[], object]
# (name, calls of a block, number of blocks) to the seconds of each block by the slowest rank.
TimeBlocks = Callable[[str, int, int], list[float]]


class LeftOut(Exception):
    """A library cannot be timed any further."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call by the slowest rank, over all blocks; `num_calls` were made in all.

    min_s and p99_s are None in records of runs that kept the median alone.
    """

    median_s: float
    min_s: float | None
    p99_s: float | None
    num_calls: int | None

    @staticmethod
    def of(samples_s: Iterable[float], calls_per_block: int) -> Timing:
        """From the time per call of each block; 99 % of the blocks do not exceed p99_s."""
        ordered = sorted(samples_s)
        p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
        num_calls = len(ordered) * calls_per_block
        return Timing(statistics.median(ordered), ordered[0], p99_s, num_calls)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: blocks in all, in how many rounds, and the limit of time for a case."""

    blocks: int = NUM_BLOCKS
    rounds: int = 1
    limit_s: float = 2.0
    most_calls: int = MOST_CALLS  # of a block

    def blocks_of(self, block_s: float) -> int:
        """Blocks in all, of a block that takes so long."""
        affordable = max(FEWEST_BLOCKS, int(self.limit_s / max(block_s, 1e-9)))
        return min(self.blocks, affordable)


def time_block(call: Call, num_calls: int) -> float:
    """Seconds of so many calls back to back."""
    start_s = time.perf_counter()
    for _ in repeat(None, num_calls):
        call()
    return time.perf_counter() - start_s


# Each call records its place in the caller's code: the innermost frame outside the package pycoll.
# A user's loop is such a frame. This one becomes such a frame, too: else each call would search the
# whole stack.
time_block.__code__ = time_block.__code__.replace(co_filename="<pycoll.bench>")


def calibrate(
    slowest: Callable[[int], float], block_s: float = BLOCK_S, most: int = MOST_CALLS
) -> tuple[int, float]:
    """Finds how many calls take `block_s`.

    Args:
        slowest: Seconds of a block of so many calls, by the slowest rank; the same on all ranks.
        block_s: The block is at least so long, seconds.
        most: The block has at most so many calls.

    Returns:
        Calls of a block, and its seconds. A block that seems long enough is timed again: one
        interruption does not decide.
    """
    num_calls = 1
    while (spent_s := slowest(num_calls)) < block_s or (spent_s := slowest(num_calls)) < block_s:
        if num_calls >= most:
            break
        num_calls = min(2 * num_calls, most)
    return num_calls, spent_s


def measure(
    names: Iterable[str],
    time_blocks: TimeBlocks,
    effort: Effort,
    shuffled: Callable[[list[str]], list[str]] = list,
) -> dict[str, Timing]:
    """Times several calls, interleaved: in each round every one has a turn.

    Args:
        names: Names of the calls.
        time_blocks: Times blocks; raises LeftOut for a name that takes no further part.
        effort: How much.
        shuffled: The order of a round.

    Returns:
        By name; without those that were left out.
    """
    found: dict[str, tuple[int, float]] = {}
    samples_s: dict[str, list[float]] = {}
    for name in names:
        try:
            found[name] = calibrate(
                lambda num_calls, name=name: time_blocks(name, num_calls, 1)[0],  # type: ignore[misc]
                most=effort.most_calls,
            )
            samples_s[name] = []
        except LeftOut:
            pass
    for round_idx in range(effort.rounds):
        for name in shuffled(list(samples_s)):
            num_calls, block_s = found[name]
            blocks = effort.blocks_of(block_s)
            # The blocks are dealt to the rounds; the last rounds may have none.
            mine = len(range(round_idx, blocks, effort.rounds))
            if mine == 0:
                continue
            try:
                times_s = time_blocks(name, num_calls, mine)
                samples_s[name] += [time_s / num_calls for time_s in times_s]
            except LeftOut:
                del samples_s[name]
    return {name: Timing.of(times_s, found[name][0]) for name, times_s in samples_s.items()}


def measure_here(
    calls: dict[str, Call],
    barrier: Call,
    slowest: Callable[[float], float],
    effort: Effort,
    warmup: int = WARMUP,
) -> dict[str, Timing]:
    """`measure` on a rank of a running world: every rank calls it with the same names.

    Args:
        calls: The calls, by name.
        barrier: Before each block.
        slowest: The largest of the ranks' values, on every rank.
        effort: How much.
        warmup: Untimed calls of each before all.
    """
    for call in calls.values():
        for _ in repeat(None, warmup):
            call()

    def time_blocks(name: str, num_calls: int, num_blocks: int) -> list[float]:
        times_s = []
        for _ in repeat(None, num_blocks):
            barrier()
            times_s.append(slowest(time_block(calls[name], num_calls)))
        return times_s

    return measure(calls, time_blocks, effort)


def spread_ranks(comm: Any) -> None:
    """New processes begin on their parent's core; one that wakes up is put on an idle one."""
    for _ in range(20):
        time.sleep(0.005)
        comm.barrier()


@contextmanager
def pinned(rank: int, num_ranks: int) -> Iterator[None]:
    """This thread on a core of its own, where there are enough; the perf binaries do the same."""
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > len(cores):
        yield
        return
    os.sched_setaffinity(0, {cores[rank]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
