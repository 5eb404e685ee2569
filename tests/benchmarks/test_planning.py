"""benchmarks/planning.py: what it measures, its table, its goals."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from planning import QUICK_SIZE, Row, choices, measure, summary, table

from pycoll.parallel import Layout

pytestmark = [pytest.mark.ranks, pytest.mark.torch, pytest.mark.timeout(120)]

ROWS = [
    Row("sleep", Layout(), 1.0, 1.0, [1.0]),
    Row("sleep", Layout(dp=2), 0.5, 0.6, [0.6]),
    Row("sleep", Layout(tp=2), 0.55, 0.5, [0.5]),
]


@pytest.mark.pure
def test_summary_has_errors_and_the_cost_of_the_choice():
    assert choices(ROWS) == {("sleep", 1): 1.0, ("sleep", 2): pytest.approx(1.2)}
    lines = summary(ROWS)
    assert lines[0].startswith("sleep: 3 layouts, median error 10.0% (goal 10%), worst 16.7%")
    assert "2 ranks: the predicted best takes 1.200 times the measured best" in lines[2]
    assert table(ROWS).splitlines()[3] == "| sleep | dp=2 m=1 | 500 | 600 | -16.7% |"


def test_a_layout_is_predicted_and_measured():
    """Seconds: two ranks are calibrated, and take three steps."""
    (row,) = measure("sleep", QUICK_SIZE, [Layout(dp=2)], 1, rate=20e6)
    assert row.measured_s == min(row.steps_s) >= 0.99 * row.predicted_s > 0
