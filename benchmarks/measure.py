"""One message of the comparison: the turns of every library and of the floors, interleaved.

The cores of a virtual machine share a cache in one minute and none in the next. If that changes
while a message is measured, the libraries had different machines, so it is measured again.
"""

from __future__ import annotations

import random
import time
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

LOOK_PERIOD_S = 1.0  # between two looks at where the cores are, of 70 ms
MOVED = 2.0  # a flight takes 50 to 60 ns between cores that share a cache, else 250
MOST_TRIES = 3
CALLS_OF_COLD_CACHES = 4  # at the beginning of a turn, not timed; or a block, if it has more


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
    flights_us: list[float] = []
    next_look_s = 0.0

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
        look()
        # A turn begins with the caches as the last library left them.
        warmup = max(num_calls, CALLS_OF_COLD_CACHES) if num_blocks > 1 else 0
        return attempt(name, lambda job: job.time_blocks(warmup, num_calls, num_blocks))

    def look() -> None:
        nonlocal next_look_s
        floor = jobs.get("floor")
        if isinstance(floor, FloorJob) and time.monotonic() >= next_look_s:
            can("floor", lambda _: flights_us.append(floor.flight_us()))
            next_look_s = time.monotonic() + LOOK_PERIOD_S

    def warm_up(job: Job | FloorJob) -> None:
        job.time_blocks(WARMUP, 1, 1)

    begin = (lambda job: job.prepare(case), lambda job: job.check(), warm_up)
    names = [name for name in list(jobs) if can(name, *begin)]
    shuffled = lambda names: random.sample(names, len(names))  # noqa: E731
    for _ in range(MOST_TRIES):
        flights_us.clear()
        timings = measure([name for name in names if name in jobs], time_blocks, effort, shuffled)
        if not flights_us or max(flights_us) < MOVED * min(flights_us):
            break
    return [
        Row(case.of_library(name), timing, num_wrong=0)
        for name, timing in timings.items()
        if can(name, lambda job: job.check())
    ]
