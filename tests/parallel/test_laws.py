"""Laws of scaling, on numbers."""

from __future__ import annotations

import pytest

from pycoll import UsageError
from pycoll.cli.scale import report
from pycoll.parallel.tools import scaling_laws as laws

pytestmark = pytest.mark.pure


def test_fits_find_what_the_laws_were_given():
    for parallel in (0.0, 0.5, 0.8, 1.0):
        times = {n: 3.0 / laws.amdahl(parallel, n) for n in (1, 2, 4, 8)}
        fit = laws.fit_amdahl(times)
        assert fit.parallel == pytest.approx(parallel, abs=1e-9)
        assert fit.speed_up == pytest.approx(fit.law)
        alone = {n: 3.0 * laws.gustafson(parallel, n) for n in times}
        fit = laws.fit_gustafson(dict.fromkeys(times, 3.0), alone)
        assert fit.parallel == pytest.approx(parallel, abs=1e-9)
        assert fit.efficiency == dict.fromkeys(times, 1.0)


def test_report_of_scaling_knows_strong_from_weak():
    strong = report({1: (1.0, 64), 2: (0.6, 64), 4: (0.4, 64)})
    assert strong["kind"] == "strong" and strong["parallel"] == pytest.approx(0.8)
    assert [row["efficiency"] for row in strong["rows"]] == pytest.approx([1, 1 / 1.2, 1 / 1.6])
    weak = report({1: (1.0, 64), 2: (1.25, 128)})
    assert weak["kind"] == "weak" and weak["rows"][1]["speed_up"] == pytest.approx(1.6)
    assert weak["rows"][1]["efficiency"] == pytest.approx(0.8)
    with pytest.raises(UsageError, match="they neither stay nor grow"):
        report({1: (1.0, 64), 2: (1.0, 100)})


def test_times_without_one_rank_are_an_error():
    with pytest.raises(UsageError, match="expected times of one rank"):
        laws.fit_amdahl({2: 1.0, 4: 0.5})
