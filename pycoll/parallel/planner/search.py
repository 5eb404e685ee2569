"""Four searches of one space: all points, dynamic programming, a Markov chain, and halving.

A space says what its points are and what each costs; infinity is a point that does not fit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pycoll.errors import UsageError

P = TypeVar("P")


class Space(Protocol[P]):
    """Points and their costs."""

    def points(self) -> Iterable[P]:
        """All points."""

    def cost(self, point: P) -> float:
        """Cost of a point; infinity if it does not fit."""

    def neighbors(self, point: P) -> Sequence[P]:
        """Points that differ from a point in one choice."""

    def start(self) -> P:
        """A point from which neighbors lead to every other one."""

    def halvings(self) -> Iterator[list[P]]:
        """For each halving of the world: the points that it may lead to, by what was chosen."""

    def best(self) -> P | None:
        """The best point by dynamic programming."""


def exhaustive(space: Space[P]) -> P | None:
    """Tries all points. Cost: one evaluation for each."""
    return _least(space, space.points())


def mcmc(space: Space[P], *, seed: int = 0, steps: int = 2000, chains: int = 4) -> P | None:
    """Walks from neighbor to neighbor: to a better one always, to a worse one now and then.

    Args:
        space: The space.
        seed: Seed of the walk.
        steps: Number of proposals of each chain.
        chains: Number of walks, each from the best point so far.

    Returns:
        The best point seen; None if none fits.

    Source: FlexFlow, Jia, Zaharia, Aiken, SysML 2019, section 5.3.
    """
    draw = random.Random(seed)
    best, best_cost = space.start(), space.cost(space.start())
    for _ in range(chains):
        here, cost = best, best_cost
        for step in range(steps):
            near = space.neighbors(here)
            if not near:
                break
            there = near[draw.randrange(len(near))]
            new = space.cost(there)
            # The walk cools down, from steps that double the cost to none that raise it.
            heat = 0.7 * (1 - step / steps) + 1e-9
            worse = new / cost - 1 if math.isfinite(cost) and cost else -1.0
            if not math.isfinite(new) and math.isfinite(cost):
                continue
            if worse <= 0 or draw.random() < math.exp(-worse / heat):
                here, cost = there, new
            if cost < best_cost:
                best, best_cost = here, cost
    return best if math.isfinite(best_cost) else None


def recursive(space: Space[P]) -> P | None:
    """Halves the world again and again, each time by the choice of least cost.

    Source: Tofu, Wang, Huang, Li, EuroSys 2019, section 5.
    """
    found: P | None = None
    halvings = space.halvings()
    try:
        options = next(halvings)
        while True:
            found = _least(space, options)
            if found is None:
                return None
            options = halvings.send(found)  # type: ignore[attr-defined]
    except StopIteration:
        return found


def dp(space: Space[P]) -> P | None:
    """Dynamic programming of the space's own.

    Source: PipeDream, SOSP 2019, section 3.1; Galvatron, Miao et al., VLDB 2023, section 3.3.
    """
    return space.best()


def _least(space: Space[P], points: Iterable[P]) -> P | None:
    best, best_cost = None, math.inf
    for point in points:
        cost = space.cost(point)
        if cost < best_cost:
            best, best_cost = point, cost
    return best


SEARCHES: dict[str, Callable[..., object | None]] = {
    "exhaustive": exhaustive,
    "dp": dp,
    "mcmc": mcmc,
    "recursive": recursive,
}


def search_of(name: str) -> Callable[..., object | None]:
    """A search by its name.

    Raises:
        UsageError: There is no such search.
    """
    if name not in SEARCHES:
        raise UsageError(f"plan: search is {name!r}, expected one of {', '.join(SEARCHES)}")
    return SEARCHES[name]


__all__ = ["SEARCHES", "Space", "dp", "exhaustive", "mcmc", "recursive", "search_of"]
