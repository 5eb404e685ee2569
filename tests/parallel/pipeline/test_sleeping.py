"""Measured bubbles: stages that sleep, on real ranks, compared with the formulas."""

from __future__ import annotations

import pytest

from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.schedules.pipedream import round_robin
from pycoll.parallel.pipeline.sleeping import measure
from pycoll.parallel.planner.replicated_stages import Layer, replicated_stages

pytestmark = [pytest.mark.timing, pytest.mark.soak, pytest.mark.timeout(1200)]

POINTS = 0.02  # of all time
UNITS_S = (0.012, 0.03, 0.1, 0.3)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("name", pipeline.names())
def test_bubble_measured_is_that_of_the_formula(name, p):
    """Times that are off are measured again, with longer sleeps.

    Another process that delays a sleeper delays all ranks behind it. That adds to the bubble and is
    no fault of the schedule. Longer sleeps make it a smaller part.
    """
    row = pipeline.generator(name)
    v = row.default_stages
    left, off = list(range(1, 33)), {}
    for unit_s in UNITS_S:
        schedules = [pipeline.build(name, p, m, v) for m in left]
        for m, measured in zip(left, measure(schedules, unit_s=unit_s), strict=True):
            played = measured.played
            assert played.peak_live == tuple(row.live(p, m, v, r) for r in range(p))
            bubble = row.bubble(p, m, v, pipeline.Costs())
            error = played.idle_share - bubble / (1 + bubble)
            if row.staleness is not None:
                stale = {s: max(row.staleness(p, s, i) for i in range(m)) for s in range(p)}
                assert measured.updates == stale
                if m >= 2 * p and abs(error) <= POINTS:
                    error = max(error, played.idle_share_between(*played.steady), key=abs)
            off[m] = min(off.get(m, 1.0), error, key=abs)
        left = [m for m in left if abs(off[m]) > POINTS]
        if not left:
            break
    print(f"{name} p={p}: at most {100 * max(map(abs, off.values())):.2f} points off")
    assert all(abs(error) <= POINTS for error in off.values()), off


def test_stages_with_replicas_are_as_fast_as_planned():
    """A slow and a fast stage, run by stages that sleep: the time between two microbatches.

    Times that are off are measured again, with longer sleeps, as above.
    """
    schedules = [round_robin((3, 1), m) for m in (12, 48)]
    for unit_s in UNITS_S[1:]:
        layers = [Layer(9 * unit_s, 0.0, 0.0), Layer(3 * unit_s, 0.0, 1e7)]  # seconds, then bytes
        plan = replicated_stages(layers, 4, 1e9)
        assert plan.shape == "3-1" and plan.in_flight == 2
        found = measure(schedules, unit_s=unit_s, stage_scale=[3.0, 1.0])
        short, long = (one.played.time for one in found)
        between_s = (long - short) / 36
        print(f"{between_s:.4f} s between two microbatches, planned {plan.seconds:.4f} s")
        if between_s == pytest.approx(plan.seconds, rel=0.1):
            return
    raise AssertionError(f"{between_s:.4f} s, planned {plan.seconds:.4f} s")
