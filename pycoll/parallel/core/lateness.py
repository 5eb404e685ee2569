"""Which rank is late, and in which part of a step."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

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


__all__ = ["PARTS", "Late", "latest"]
