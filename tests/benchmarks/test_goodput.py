"""What benchmarks/goodput.py counts."""

from __future__ import annotations

import pytest
from goodput import CALM_S, result_of, table, trace

pytestmark = pytest.mark.pure


def test_kills_follow_from_the_seed_and_leave_a_calm_time():
    kills = trace(1, 1000.0, 10.0)
    assert kills == trace(1, 1000.0, 10.0) != trace(2, 1000.0, 10.0)
    assert 70 < len(kills) < 130 and kills[0][0] > CALM_S and kills[-1][0] < 1000.0


def test_goodput_is_the_share_of_the_time_that_the_steps_need_without_faults():
    progress = [(0.1 * i, float(i)) for i in range(11)] + [(2.0, 10.0), (2.1, 11.0)]
    result = result_of("save 10", progress, [(1.5, 0.0)], 2.2)
    assert result.step_ms == pytest.approx(100.0)
    assert result.steps == 11 and result.goodput == pytest.approx(0.5)
    assert "| `pc.save` every 10 steps, restart | 1 | 11 | 100.0 | 50.0% |" in table([result])
