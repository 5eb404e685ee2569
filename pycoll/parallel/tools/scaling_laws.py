"""Laws of scaling, and their fits to measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pycoll.errors import UsageError


def amdahl(parallel: float, num_ranks: float) -> float:
    """Speed-up of a job of fixed size; `parallel` is the share of its time that is shared out.

    Source: Amdahl, Validity of the Single Processor Approach, 1967.
    """
    return 1.0 / ((1.0 - parallel) + parallel / num_ranks)


def gustafson(parallel: float, num_ranks: float) -> float:
    """Scaled speed-up of a job that grows with the ranks; `parallel` is its parallel share.

    Source: Gustafson, Reevaluating Amdahl's Law, 1988.
    """
    return (1.0 - parallel) + parallel * num_ranks


def amdahl_limit(parallel: float) -> float:
    """Speed-up that no number of ranks exceeds, 1 / (1 - p); infinity if all is parallel."""
    return 1.0 / (1.0 - parallel) if parallel < 1 else math.inf


def karp_flatt(speed_up: float, num_ranks: float) -> float:
    """Serial share of the time that a measured speed-up on some ranks amounts to.

    If it grows with the ranks, communication or waiting limits the speed-up, not serial work.

    Source: Karp, Flatt, Measuring Parallel Processor Performance, CACM 33(5), 1990.

    Raises:
        UsageError: `num_ranks` is not above 1, or `speed_up` is not above 0.
    """
    if not num_ranks > 1 or not speed_up > 0:
        raise UsageError(
            f"laws: speed-up {speed_up} on {num_ranks} ranks, expected one above 0 on 2 or more"
        )
    return (1 / speed_up - 1 / num_ranks) / (1 - 1 / num_ranks)


def petaflop_s_days(flops: float) -> float:
    """Operations in petaflop/s-days: 1e15 operations a second for a day, 8.64e19."""
    return flops / (1e15 * 86_400)


def cheapest(
    times_s: Mapping[int, float], price_per_rank_s: float, deadline_s: float
) -> tuple[int, float]:
    """The number of ranks that costs least and keeps a deadline.

    Args:
        times_s: Seconds of the job by number of ranks.
        price_per_rank_s: Price of one rank for one second.
        deadline_s: Seconds after which the job must be done.

    Returns:
        The number of ranks, and the price of the job.

    Raises:
        UsageError: No number of ranks keeps the deadline.
    """
    in_time = {n: n * t * price_per_rank_s for n, t in times_s.items() if t <= deadline_s}
    if not in_time:
        fastest = min(times_s.values(), default=math.inf)
        raise UsageError(
            f"laws: no number of ranks keeps {deadline_s:g} s; the fastest takes {fastest:g} s"
        )
    best = min(in_time, key=lambda n: (in_time[n], n))
    return best, in_time[best]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fit of a scaling law to times on several numbers of ranks.

    Attributes:
        parallel: Share of the time that is shared out.
        serial_s: Seconds that are not shared out.
        speed_up: Measured speed-up, by number of ranks.
        efficiency: Measured efficiency: T1 / (N TN) for strong scaling, T1 / TN for weak scaling.
        law: Speed-up that the law gives for `parallel`, by number of ranks.
    """

    parallel: float
    serial_s: float
    speed_up: dict[int, float]
    efficiency: dict[int, float]
    law: dict[int, float]


def fit_amdahl(times_s: Mapping[int, float]) -> Fit:
    """Fits T(N) = serial + shared / N to times of one job (strong scaling).

    Args:
        times_s: Seconds by number of ranks, including one rank.

    Returns:
        The fit, by least squares of relative errors.

    Raises:
        UsageError: Fewer than two numbers of ranks, or no time of one rank.
    """
    one_s = _one(times_s)
    ranks = np.array(list(times_s), float)
    times = np.array(list(times_s.values()))
    serial_s, shared_s = _least_squares(np.stack([np.ones_like(ranks), 1 / ranks], 1), times)
    parallel = shared_s / (serial_s + shared_s)
    return Fit(
        parallel,
        serial_s,
        {n: one_s / t for n, t in times_s.items()},
        {n: one_s / t / n for n, t in times_s.items()},
        {n: amdahl(parallel, n) for n in times_s},
    )


def fit_gustafson(times_s: Mapping[int, float], alone_s: Mapping[int, float]) -> Fit:
    """Fits S(N) = (1 - p) + p N to times of a job whose parallel part grows as N (weak scaling).

    Args:
        times_s: Seconds by number of ranks, each for the job of its size; including one rank.
        alone_s: Seconds that one rank takes for each of these jobs.

    Returns:
        The fit, by least squares; the speed-up is `alone_s` over `times_s`.

    Raises:
        UsageError: Fewer than two numbers of ranks, no time of one rank, or other numbers of ranks
            in `alone_s`.
    """
    one_s = _one(times_s)
    if alone_s.keys() != times_s.keys():
        raise UsageError("laws: expected times of one rank for the same numbers of ranks")
    speed_up = {n: alone_s[n] / times_s[n] for n in times_s}
    more = np.array([n - 1 for n in times_s], float)
    gained = np.array([speed_up[n] - 1 for n in times_s])
    parallel = float(more @ gained / (more @ more))
    return Fit(
        parallel,
        (1.0 - parallel) * one_s,
        speed_up,
        {n: one_s / t for n, t in times_s.items()},
        {n: gustafson(parallel, n) for n in times_s},
    )


def _one(times_s: Mapping[int, float]) -> float:
    if 1 not in times_s or len(times_s) < 2:
        raise UsageError("laws: expected times of one rank and of another number of ranks")
    return times_s[1]


def _least_squares(columns: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    solution = np.linalg.lstsq(columns / times[:, None], np.ones_like(times), rcond=None)[0]
    return float(solution[0]), float(solution[1])


__all__ = [
    "Fit",
    "amdahl",
    "amdahl_limit",
    "cheapest",
    "fit_amdahl",
    "fit_gustafson",
    "gustafson",
    "karp_flatt",
    "petaflop_s_days",
]
