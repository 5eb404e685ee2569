"""The layouts of a world as a space for the searches, with predictions that are kept."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator

from pycoll.errors import UsageError
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.layouts import Choices, Layout, all_layouts
from pycoll.parallel.planner.step import Prediction

KEPT = 10  # layouts that a plan shows
_TRIED = 6  # layouts of a family that are tried before it is said to need too much memory


class LayoutSpace:
    """Layouts and the seconds of their steps.

    Attributes:
        model: The cost function.
        world: Number of ranks.
        limit: Bytes that a rank may keep.
        known: The prediction of each layout that was tried, or the error that says why it cannot
            run.
        bounds: Seconds and bytes that a layout needs at least, if they were asked for.
    """

    def __init__(self, model: CostModel, world: int, limit: int, choices: Choices) -> None:
        self.model, self.world, self.limit, self.choices = model, world, limit, choices
        self.known: dict[Layout, Prediction | UsageError] = {}
        self.bounds: dict[Layout, tuple[float, int]] = {}
        self._points: dict[int, list[Layout]] = {}

    @property
    def tried(self) -> int:
        """Number of layouts whose cost or bound was asked for."""
        return len(self.known.keys() | self.bounds.keys())

    def points(self) -> list[Layout]:
        """All layouts of the world."""
        return self._of(self.world)

    def _of(self, world: int) -> list[Layout]:
        if world not in self._points:
            model, cluster = self.model, self.model.cluster
            per_host = cluster.levels[0].size
            self._points[world] = list(
                all_layouts(world, model.batch, model.num_blocks, per_host, self.choices)
            )
        return self._points[world]

    def prediction(self, layout: Layout) -> Prediction | UsageError:
        """What a layout costs, or why it cannot run."""
        if layout not in self.known:
            try:
                self.known[layout] = self.model.predict(layout)
            except UsageError as error:
                self.known[layout] = error
        return self.known[layout]

    def cost(self, layout: Layout) -> float:
        """Seconds of a step; infinity if the layout cannot run or does not fit."""
        found = self.prediction(layout)
        if isinstance(found, UsageError) or found.memory > self.limit:
            return math.inf
        return found.seconds

    def _fits(self, of: Prediction | UsageError) -> bool:
        return isinstance(of, Prediction) and of.memory <= self.limit

    def ranked(self) -> list[Prediction]:
        """The layouts of the whole world that fit, fastest first."""
        fit = [
            of
            for layout, of in self.known.items()
            if isinstance(of, Prediction) and layout.world == self.world and self._fits(of)
        ]
        return sorted(fit, key=lambda of: (of.seconds, of.memory))

    def start(self) -> Layout:
        """The layout that needs least memory among the first that can run."""
        points = self.points()
        if not points:
            raise UsageError(
                f"plan: no layout of {self.world} ranks: a batch of {self.model.batch} samples "
                f"and {self.model.num_blocks} blocks do not divide among them"
            )
        most_shared = max(points, key=lambda p: (p.pp * p.tp, p.zero, p.recompute is not None))
        for point in (most_shared, *points):
            if math.isfinite(self.cost(point)):
                return point
        return points[0]

    def neighbors(self, layout: Layout) -> list[Layout]:
        """Layouts that move a factor from an axis to another, or change one option."""
        return [other for other in self.points() if _distance(layout, other) == 1]

    def halvings(self) -> Generator[list[Layout], Layout, None]:
        """Yields the layouts of growing worlds; each has one more prime factor on one axis."""
        world, here = 1, None
        for factor in _primes(self.world):
            world *= factor
            grown = [
                layout for layout in self._of(world) if here is None or _grows(here, layout, factor)
            ]
            # Intermediate worlds may need more memory than there is; only the last one must fit.
            here = yield grown

    def best(self) -> Layout | None:
        """The best layout, without simulating those that cannot be among the ten best.

        The dynamic program that cuts the blocks into stages gives a bound below the time of each
        layout. Layouts are tried in the order of their bounds until a bound is above the times of
        ten that fit; those whose weights alone do not fit are not tried.
        """
        fit: list[float] = []
        for bound_s, layout in self.fitting_bounds():
            if len(fit) >= KEPT and bound_s >= sorted(fit)[KEPT - 1]:
                break
            seconds = self.cost(layout)
            if math.isfinite(seconds):
                fit.append(seconds)
        ranked = self.ranked()
        return ranked[0].layout if ranked else None

    def fitting_bounds(self) -> list[tuple[float, Layout]]:
        """Bounds below the seconds of the layouts whose weights fit, lowest first."""
        found: list[tuple[float, Layout]] = []
        for layout in self.points():
            try:
                bound_s, least = self.bounds[layout] = self.model.bound(layout)
            except UsageError as error:
                self.known[layout] = error
                continue
            if least <= self.limit:
                found.append((bound_s, layout))
        return sorted(found, key=lambda of: of[0])

    def each_family(self) -> dict[str, list[Prediction | UsageError]]:
        """What is known of each family of layouts of the whole world, one prediction at least."""
        families: dict[str, list[Prediction | UsageError]] = {}
        for layout, of in list(self.known.items()):
            if layout.world == self.world:
                families.setdefault(layout.family, []).append(of)
        missing: dict[str, list[Layout]] = {}
        for layout in self.bounds:
            if not any(self._fits(of) for of in families.get(layout.family, ())):
                missing.setdefault(layout.family, []).append(layout)
        for family, layouts in missing.items():
            found = families.setdefault(family, [])
            light = [layout for layout in layouts if self.bounds[layout][1] <= self.limit]
            # Fast ones first; if none of them fits, the one with the smallest weights.
            fast = sorted(light, key=lambda layout: self.bounds[layout][0])[:_TRIED]
            small = min(light or layouts, key=lambda layout: self.bounds[layout][1])
            for layout in (*fast, small):
                found.append(self.prediction(layout))
                if self._fits(found[-1]):
                    break
        return families


def _distance(a: Layout, b: Layout) -> int:
    """Number of choices in which two layouts differ; axes that exchange a factor are one."""
    axes = sum(a.sizes[axis] != b.sizes[axis] for axis in a.sizes)
    size_a, size_b = a.replicas * a.microbatches, b.replicas * b.microbatches
    options = [
        size_a != size_b and axes == 0,
        a.zero != b.zero and b.replicas * b.cp > 1 and a.replicas * a.cp > 1,
        a.schedule != b.schedule and a.pp > 1 and b.pp > 1,
        a.recompute != b.recompute,
        a.sequence_parallel != b.sequence_parallel and a.tp > 1 and b.tp > 1,
    ]
    if axes > 2:
        return 3
    return (axes == 2) + sum(options)


def _primes(n: int) -> Iterator[int]:
    factor = 2
    while n > 1:
        while n % factor == 0:
            yield factor
            n //= factor
        factor += 1


def _grows(small: Layout, large: Layout, factor: int) -> bool:
    """Whether one axis has grown by a factor, and nothing else has shrunk."""
    grown = [large.sizes[axis] / small.sizes[axis] for axis in small.sizes]
    return sorted(grown) == [1.0] * (len(grown) - 1) + [float(factor)]


__all__ = ["LayoutSpace"]
