"""A row of the table of algorithms; see csrc/algorithms/table/registry.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["AlgorithmInfo"]


@dataclass(frozen=True, slots=True)
class AlgorithmInfo:
    """A row of the table of algorithms.

    Args:
        collective: name of the collective.
        name: name for build() and `algorithm=`.
        cost: time for n ranks and N bytes in alpha, beta, gamma.
        source: publication of the algorithm.
        sent_fraction: f(n, rank, root=0), the amount that a rank sends in units of the payload;
            None for registered algorithms.
    """

    collective: str
    name: str
    cost: str
    source: str
    sent_fraction: Callable[..., float] | None
