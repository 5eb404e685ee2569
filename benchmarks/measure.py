"""One message of the comparison: the turns of every library and of the floors, interleaved."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from floor import FloorJob
from jobs import Job, UnsupportedError
from peers import PeerError

from pycoll.bench.case import Case
from pycoll.bench.record import Row
from pycoll.bench.timing import WARMUP, Effort, LeftOut, measure

# A library that would take longer than the limit is measured in fewer blocks.
FULL, QUICK = Effort(40, rounds=8, limit_s=8.0), Effort(20, rounds=4, limit_s=4.0)


def measure_row(
    jobs: dict[str, Job | FloorJob],
    case: Case,
    effort: Effort,
    failed: Callable[[str, PeerError | UnsupportedError], None],
) -> list[Row]:
    """All rounds of one message, checked before and after.

    `failed` is called with each library that cannot take part, and the reason. One that fails is
    stopped and leaves `jobs`; one that has no such collective does not.
    """

    def attempt(name: str, act: Callable[[Job | FloorJob], Any]) -> Any:
        try:
            return act(jobs[name])
        except UnsupportedError as reason:
            failed(name, reason)
        except PeerError as error:
            jobs.pop(name).stop()
            failed(name, error)
        raise LeftOut

    def can(name: str, *acts: Callable[[Job | FloorJob], Any]) -> bool:
        try:
            for act in acts:
                attempt(name, act)
        except LeftOut:
            return False
        return True

    def time_blocks(name: str, num_calls: int, num_blocks: int) -> list[float]:
        # A turn begins with the caches as the last library left them: one block is not timed.
        warmup = num_calls if num_blocks > 1 else 0
        return attempt(name, lambda job: job.time_blocks(warmup, num_calls, num_blocks))

    def warm_up(job: Job | FloorJob) -> None:
        job.time_blocks(WARMUP, 1, 1)

    begin = (lambda job: job.prepare(case), lambda job: job.check(), warm_up)
    names = [name for name in list(jobs) if can(name, *begin)]
    shuffled = lambda names: random.sample(names, len(names))  # noqa: E731
    timings = measure(names, time_blocks, effort, shuffled)
    return [
        Row(case.of_library(name), timing, num_wrong=0)
        for name, timing in timings.items()
        if can(name, lambda job: job.check())
    ]
