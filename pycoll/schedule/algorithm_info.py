"""A row of the table of algorithms; see csrc/algorithms/table/registry.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["AlgorithmInfo"]


@dataclass(frozen=True, slots=True)
class AlgorithmInfo:
    """A row of the table of algorithms.

    Args:
        collective: what it does.
        name: for build() and for `algorithm=`.
        cost: time of n ranks and N bytes in alpha, beta, gamma.
        source: where it was published.
        sent_fraction: f(n, rank, root=0), what a rank sends in units of the message; None for
            registered algorithms.
    """

    collective: str
    name: str
    cost: str
    source: str
    sent_fraction: Callable[..., float] | None
