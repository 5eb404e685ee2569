"""True bubbles: stages that sleep, on real ranks, against the formulas."""

from __future__ import annotations

import pytest
import torch  # noqa: F401 - once, before ranks are forked

from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.pipedream import staleness
from pycoll.parallel.pipeline.sleeping import Measured, measure

pytestmark = [pytest.mark.timing, pytest.mark.soak, pytest.mark.timeout(1200)]

POINTS = 0.02  # of all time
UNITS_S = (0.012, 0.03, 0.1, 0.3)


def stated_idle_share(name: str, p: int, m: int, v: int) -> float:
    bubble = pipeline.generator(name).bubble(p, m, v, pipeline.Costs())
    return bubble / (1 + bubble)


def steady_idle_share(measured: Measured) -> float:
    return measured.played.idle_share_between(*measured.played.steady)


def check(name: str, p: int, microbatches: list[int]) -> dict[int, float]:
    """Checks all figures of measured steps; measures times again, with longer sleeps, if need be.

    Another process that delays a sleeper delays all ranks behind it. That adds to the bubble and is
    no fault of the schedule. Longer sleeps make it a smaller part.

    Returns:
        By number of microbatches, how far the share of idle time is off.
    """
    row = pipeline.generator(name)
    v = row.default_stages
    left, off = list(microbatches), {}
    for unit_s in UNITS_S:
        schedules = [pipeline.build(name, p, m, v) for m in left]
        for m, measured in zip(left, measure(schedules, unit_s=unit_s), strict=True):
            assert measured.played.peak_live == tuple(row.live(p, m, v, r) for r in range(p))
            if name == "pipedream":
                stale = {s: max(staleness(p, s, i) for i in range(m)) for s in range(p)}
                assert measured.updates == stale
            error = measured.played.idle_share - stated_idle_share(name, p, m, v)
            if name == "pipedream" and m >= 2 * p and abs(error) <= POINTS:
                error = max(error, steady_idle_share(measured), key=abs)
            off[m] = min(off.get(m, 1.0), error, key=abs)
        left = [m for m in left if abs(off[m]) > POINTS]
        if not left:
            break
    return off


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("name", pipeline.names())
def test_bubble_measured_is_that_of_the_formula(name, p):
    off = check(name, p, list(range(1, 33)))
    print(f"{name} p={p}: at most {100 * max(map(abs, off.values())):.2f} points off")
    assert all(abs(error) <= POINTS for error in off.values()), off
