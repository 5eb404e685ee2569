"""Costs of the simulation, fitted to measured times."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from pycoll import _core
from pycoll.tuning.measure import AUTO, Measured

_FIT_STEPS = 2000


def fit_costs(
    measured: Iterable[Measured], n: int, cores: int, date: str, max_nbytes: int = 4 << 20
) -> list[_core.TunedCost]:
    """Finds the costs whose simulated times are nearest, for each protocol and kind of arrays.

    Nearest is the smallest mean of about |log(simulated / measured)|: a factor counts as much at
    one size as at another, and one odd measurement counts little.

    Args:
        measured: Sizes of one number of ranks.
        n: Number of ranks.
        cores: Number of cores that they share.
        date: The date of the measurement.
        max_nbytes: Larger messages do not take part, bytes.

    Returns:
        A row for each protocol and kind of arrays that was measured.

    Cost: about a second for each.
    """
    points: dict[tuple[str, str], list[tuple[str, str, int, float]]] = {}
    for size in measured:
        if size.nbytes > max_nbytes:
            continue
        for choice, time_s in size.times_s().items():
            if choice == AUTO:
                continue
            algorithm, protocol = choice.split("/")
            copied = size.arrays == "plain" and _core.pays_to_copy(size.collective, size.nbytes)
            if copied and protocol == "direct":
                continue  # not the costs of other plain arrays, which are read across processes
            points.setdefault((size.arrays, protocol), []).append(
                (size.collective, algorithm, size.nbytes, time_s)
            )
    return [
        _core.TunedCost(n, cores, arrays, date, protocol, *_fit(protocol, arrays, rows, n, cores))
        for (arrays, protocol), rows in points.items()
    ]


def _fit(
    protocol: str, arrays: str, rows: list[tuple[str, str, int, float]], n: int, cores: int
) -> tuple[float, float, float]:
    predictor = _core.Predictor([row[:3] for row in rows], protocol, arrays, n, cores)

    def error(costs: tuple[float, float, float]) -> float:
        simulated = predictor.times(*costs)
        off = (math.log(max(s, 1e-12) / row[3]) for s, row in zip(simulated, rows, strict=True))
        return sum(math.hypot(x, 0.1) for x in off)  # smooth near 0, where abs has a kink

    # Random steps (a 1+1 evolution strategy): beta and gamma may nearly stand for each other, and
    # steps along the axes end in such a valley. The seed makes the result repeatable.
    rng = random.Random(0)
    best = _core.builtin_cost(protocol, arrays, n, cores)
    best_error = error(best)
    for step in range(_FIT_STEPS):
        if step % 250 == 0:
            stride = 2.0  # far: a cost may have become too small to be felt
        alpha, beta, gamma = (
            c * math.exp(stride * rng.gauss(0, 1) * rng.randrange(2)) for c in best
        )
        tried_error = error((alpha, beta, gamma))
        if tried_error < best_error:
            best, best_error = (alpha, beta, gamma), tried_error
            stride *= 1.5
        else:
            stride *= 0.92
        stride = max(stride, 0.01)
    return best
