"""Norms of gradients over all ranks, which an optimizer that does not clip need not wait for."""

from __future__ import annotations

import math
from functools import cached_property

from torch import Tensor

from pycoll.parallel.core.lateness import PARTS, Late, latest
from pycoll.parallel.core.ledger import Started


class Norms:
    """Norms of all ranks' gradients, and times of all ranks, while they are added up."""

    def __init__(self, sums: Tensor, count: int, started: Started | None) -> None:
        """Takes what is being added up.

        Args:
            sums: `count` squares of norms, and the times of each rank.
            count: Number of squares.
            started: The all_reduce; None: there is one rank.
        """
        self._sums, self._count, self._started = sums, count, started

    @cached_property
    def _found(self) -> tuple[list[float], Late | None]:
        if self._started is None:
            return self._sums.tolist(), None
        self._started.wait()
        times = self._sums[self._count :].view(-1, len(PARTS)).tolist()
        return self._sums[: self._count].tolist(), latest(times)

    @property
    def squares(self) -> list[float]:
        """Squares of the norms of each group, and of what is in none; waits for them."""
        return self._found[0]

    @property
    def total(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(sum(self.squares))

    @property
    def late(self) -> Late | None:
        """The rank that the others waited for."""
        return self._found[1]


__all__ = ["Norms"]
