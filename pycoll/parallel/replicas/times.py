"""Times of all replicas' work, which spread from neighbor to neighbor beside the weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pycoll.parallel.core.lateness import PARTS, Late, latest


class NeighborTimes:
    """What a replica knows of how long each one worked in a step.

    Neighbors send each other all that they know, so after as many exchanges as the graph's diameter
    each replica has heard of all. Any thread may call any function.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._steps = torch.zeros(size, dtype=torch.int64)  # 0: not heard of yet
        self._busy_s = torch.zeros(size, len(PARTS), dtype=torch.float64)

    def worked(self, busy_s: Sequence[float]) -> None:
        """Notes this replica's seconds in each of `PARTS` of a step."""
        with self._lock:
            self._steps[self._rank] += 1
            self._busy_s[self._rank] = torch.tensor(busy_s, dtype=torch.float64)

    def message(self) -> Tensor:
        """All that is known, [size, 1 + len(PARTS)] float64 on the CPU."""
        with self._lock:
            return torch.cat([self._steps.double().unsqueeze(1), self._busy_s], 1)

    def merge(self, theirs: Tensor) -> None:
        """Takes what a neighbor's message knows of later steps."""
        steps = theirs[:, 0].long()
        with self._lock:
            newer = steps > self._steps
            self._busy_s[newer] = theirs[newer, 1:]
            self._steps[newer] = steps[newer]

    @property
    def late(self) -> Late | None:
        """The replica that worked longest of those that this one has heard of."""
        with self._lock:
            known = torch.nonzero(self._steps).view(-1).tolist()
            busy_s = self._busy_s[known].tolist()
        found = latest(busy_s)
        return None if found is None else Late(known[found.rank], found.part, found.seconds)


__all__ = ["NeighborTimes"]
