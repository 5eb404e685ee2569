"""The workers that a server knows: a vector clock, and their times of waiting and computing."""

from __future__ import annotations

import threading
import time
from collections import deque
from statistics import median

from pycoll.parallel.ps.consistency import Consistency

_RECENT = 10  # steps of a worker whose times are kept


class Members:
    """The living workers.

    Attributes:
        clocks: Number of steps that each living worker has ended.
        changed: Notified when a clock changes, and when a worker comes or leaves.
        waited_s: Seconds that pulls of each worker waited for other workers.
        largest_gap: Most clocks by which a worker that pulled was ahead of the slowest one.
    """

    def __init__(self, num_workers: int) -> None:
        self.clocks = dict.fromkeys(range(num_workers), 0)
        self.changed = threading.Condition()
        self.waited_s: dict[int, float] = {}
        self.largest_gap = 0
        self._pulled_s: dict[int, float] = {}  # when
        self._computed_s: dict[int, deque[float]] = {}
        self._next = num_workers

    @property
    def slowest(self) -> int:
        """The smallest clock of the living workers; 0 if there is none."""
        return min(self.clocks.values(), default=0)

    def come(self, worker: int | None, clock: int | None) -> tuple[int, int]:
        """Takes a worker up; returns its number, a new one by default, and its first clock."""
        with self.changed:
            number = self._next if worker is None else worker
            self._next = max(self._next, number + 1)
            first = self.slowest if clock is None else clock
            self.clocks[number] = max(self.clocks.get(number, 0), first)
            self.changed.notify_all()
            return number, self.clocks[number]

    def hear(self, worker: int, clock: int) -> bool:
        """Notes a worker's clock; whether it is news."""
        with self.changed:
            if clock <= self.clocks.get(worker, clock):
                return False
            self.clocks[worker] = clock
            self.changed.notify_all()
            return True

    def leave(self, worker: int) -> None:
        """Forgets a worker that has ended."""
        with self.changed:
            self.clocks.pop(worker, None)
            self.changed.notify_all()

    def behind(self, step: int) -> set[int]:
        """Living workers that have not ended a step."""
        with self.changed:
            return {worker for worker, clock in self.clocks.items() if clock <= step}

    def wait_for_others(
        self, worker: int, clock: int, consistency: Consistency, timeout_s: float
    ) -> bool:
        """Waits until a worker may pull; False at the deadline."""
        start_s = time.monotonic()
        with self.changed:

            def may() -> bool:
                return consistency.may_pull(clock, self.slowest)

            if not self.changed.wait_for(may, timeout_s):
                return False
            gap = clock - self.slowest
            assert may(), f"worker {worker} is {gap} clocks ahead"
            self.largest_gap = max(self.largest_gap, gap)
            self.add_wait(worker, time.monotonic() - start_s)
            return True

    def add_wait(self, worker: int, seconds: float) -> None:
        """Adds to the time that a worker has waited for others."""
        with self.changed:
            self.waited_s[worker] = self.waited_s.get(worker, 0.0) + seconds

    def has_pulled(self, worker: int) -> None:
        """Notes that a worker begins to compute."""
        self._pulled_s[worker] = time.monotonic()

    def has_pushed(self, worker: int) -> None:
        """Notes that a worker has computed, forward and backward, since its last pull."""
        pulled_s = self._pulled_s.pop(worker, None)
        if pulled_s is not None:
            recent = self._computed_s.setdefault(worker, deque(maxlen=_RECENT))
            recent.append(time.monotonic() - pulled_s)

    def computing_s(self) -> dict[int, float]:
        """Median seconds between a pull and the next push in the last steps of living workers."""
        return {
            worker: median(self._computed_s[worker])
            for worker in self.clocks
            if worker in self._computed_s
        }

    def latest(self) -> str:
        """The slowest worker and its clock, for errors."""
        with self.changed:
            if not self.clocks:
                return "other workers, which have all left"
            worker, clock = min(self.clocks.items(), key=lambda item: item[1])
            return f"worker {worker} at clock {clock}"


__all__ = ["Members"]
