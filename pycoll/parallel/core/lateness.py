"""Which rank is late, and in which part of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from pycoll.parallel.core.ledger import Ledger

# Parts of a step in which a rank works by itself. "stages" is the work of a pipeline's stages.
PARTS = ("between steps", "forward", "backward", "stages")


@dataclass(frozen=True, slots=True)
class Late:
    """The rank that worked longest while the others waited for it.

    Attributes:
        rank: Its number.
        part: The part of the step in which it worked longer than the others, of `PARTS`.
        seconds: How much longer than the median of the other ranks it worked in all.
    """

    rank: int
    part: str
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} is late by {self.seconds:.3f} s ({self.part})"


class Work:
    """Adds up the time in which a rank works by itself, by part of the step.

    Attributes:
        busy_s: Seconds without those in which this rank waited for others, for each of `PARTS`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._part, self._since_s = ledger, "", 0.0
        self.busy_s = dict.fromkeys(PARTS, 0.0)

    def restart(self, started_s: float) -> None:
        """Begins a step with "between steps", at a time of `time.monotonic`."""
        self.busy_s = dict.fromkeys(PARTS, 0.0)
        self._part, self._since_s = PARTS[0], started_s - self._ledger.waited_s

    def enter(self, part: str) -> None:
        """Ends the part that runs, and begins another one; "": time that does not count."""
        now_s = time.monotonic() - self._ledger.waited_s
        if self._part:
            self.busy_s[self._part] += now_s - self._since_s
        self._part, self._since_s = part, now_s


def latest(times: list[list[float]]) -> Late | None:
    """The late rank, from each rank's seconds in each of `PARTS`; None for a rank alone."""
    if len(times) < 2:
        return None
    sums = [sum(of_rank) for of_rank in times]
    rank = max(range(len(times)), key=sums.__getitem__)
    others = [of_rank for other, of_rank in enumerate(times) if other != rank]
    more = [mine - median(of_rank[i] for of_rank in others) for i, mine in enumerate(times[rank])]
    seconds = sums[rank] - median(map(sum, others))
    return Late(rank, PARTS[more.index(max(more))], seconds)


__all__ = ["PARTS", "Late", "Work", "latest"]
