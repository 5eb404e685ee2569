"""The layouts of a world as a space for the searches, with predictions that are kept."""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from pycoll.errors import UsageError
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.layouts import Choices, Layout, all_layouts
from pycoll.parallel.planner.step import Prediction

KEPT = 10  # layouts that a plan shows
_TRIED = 6  # layouts of a family and a kind of recomputation that are tried for one that fits


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
        self.bounds: dict[Layout, tuple[float, float]] = {}
        self._points: dict[int, list[Layout]] = {}
        self._near: dict[Layout, list[Layout]] = {}

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
        """Seconds of a step; infinity if the layout cannot run or does not fit.

        Halving looks at smaller worlds, too: their ranks may keep as much together as all ranks.
        """
        found = self.prediction(layout)
        if isinstance(found, UsageError) or found.memory * layout.world > self.limit * self.world:
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
        if layout not in self._near:
            near = [other for other in self.points() if _distance(layout, other) == 1]
            self._near[layout] = near
        return self._near[layout]

    def halvings(self) -> Generator[list[Layout], Layout, None]:
        """Yields the layouts of growing worlds; each has one more prime factor on one axis."""
        world, here = 1, None
        for factor in _primes(self.world):
            world *= factor
            grown = [
                layout for layout in self._of(world) if here is None or _grows(here, layout, factor)
            ]
            here = yield grown

    def best(self) -> Layout | None:
        """The best layout, without simulating those that cannot be among the ten best.

        Layouts are tried in the order of their bounds until a bound is above the times of ten that
        fit; those that cannot fit are not tried.
        """
        fit: list[float] = []
        for bound_s, layout in self.by_bound():
            if len(fit) >= KEPT and bound_s >= sorted(fit)[KEPT - 1]:
                break
            seconds = self.cost(layout)
            if math.isfinite(seconds):
                fit.append(seconds)
        ranked = self.ranked()
        return ranked[0].layout if ranked else None

    def by_bound(self, layouts: Sequence[Layout] | None = None) -> Iterator[tuple[float, Layout]]:
        """Yields a bound below the seconds of each layout that may fit, lowest first.

        A layout has a bound without a trace of its share first. The share is traced for a better
        one when that bound is the lowest.

        Args:
            layouts: The layouts; None: all.
        """
        waiting: list[tuple[float, int, Layout, bool]] = []
        points = self.points() if layouts is None else layouts
        self.model.expect(replace(of, cp=1) for of in points if of not in self.bounds)
        for number, layout in enumerate(points):
            if layout not in self.bounds and layout not in self.known:
                self.bounds[layout] = self.model.untraced_bound(layout)
            if self.bounds.get(layout, (0.0, 0.0))[1] <= self.limit:
                waiting.append((self.bounds.get(layout, (0.0, 0.0))[0], number, layout, False))
        self.model.expect(layout for _, _, layout, _ in sorted(waiting))
        heapq.heapify(waiting)
        while waiting:
            bound_s, number, layout, is_traced = heapq.heappop(waiting)
            if is_traced:
                yield bound_s, layout
                continue
            try:
                bound_s, least = self.bounds[layout] = self.model.bound(layout)
            except UsageError as error:
                self.known[layout] = error
                continue
            if least <= self.limit:
                heapq.heappush(waiting, (bound_s, number, layout, True))

    def each_family(self, within_s: float) -> dict[str, list[Prediction | UsageError]]:
        """What is known of each family of layouts of the whole world.

        A family of which no layout fits so far gets predictions until one fits, or its fastest
        layouts do not. It is empty if all of its layouts that may fit take longer than `within_s`.
        """
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
            if light and min(self.bounds[layout][0] for layout in light) > within_s:
                found.clear()
                continue
            fast = sorted(light, key=lambda layout: self.bounds[layout][0])
            options = [[of for of in fast if of.recompute == kind] for kind in (None, "full")]
            tried = [layout for of in options for layout in of[:_TRIED]]
            for _, layout in self.by_bound(tried):
                found.append(self.prediction(layout))
                if self._fits(found[-1]):
                    break
            else:
                small = min(light or layouts, key=lambda layout: self.bounds[layout][1])
                found.append(self.prediction(small))
        return families

    def smallest(self) -> Prediction | None:
        """The layout of least memory among those with the lowest bounds; None: none can run."""
        least = sorted(self.bounds, key=lambda layout: self.bounds[layout][1])
        for layout in least:
            runs = [of for of in self.known.values() if isinstance(of, Prediction)]
            found = min(runs, key=lambda of: of.memory, default=None)
            if len(runs) >= KEPT or (found and self.bounds[layout][1] >= found.memory):
                break
            self.prediction(layout)
        runs = [of for of in self.known.values() if isinstance(of, Prediction)]
        return min(runs, key=lambda of: of.memory, default=None)

    def least_s(self, family: str) -> tuple[float, Layout]:
        """The lowest bound of a family's layouts that may fit."""
        return min(
            (
                (seconds, layout)
                for layout, (seconds, nbytes) in self.bounds.items()
                if layout.family == family and nbytes <= self.limit
            ),
            key=lambda of: of[0],
        )


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
