"""Numbers that follow from the laws of scaling."""

from __future__ import annotations

import math

import pytest

from pycoll import UsageError
from pycoll.parallel.tools import scaling_laws as laws

pytestmark = pytest.mark.pure


def test_the_limit_of_amdahl_is_what_many_ranks_approach():
    assert laws.amdahl_limit(0.8) == pytest.approx(5)
    assert laws.amdahl(0.8, 1e9) == pytest.approx(laws.amdahl_limit(0.8))
    assert laws.amdahl_limit(1.0) == math.inf


def test_karp_and_flatt_find_the_serial_share_of_amdahls_law():
    for n in (2, 4, 64):
        assert laws.karp_flatt(laws.amdahl(0.9, n), n) == pytest.approx(0.1)
    with pytest.raises(UsageError, match="speed-up 1 on 1 ranks"):
        laws.karp_flatt(1, 1)


def test_a_petaflop_s_day_is_8_64e19_operations():
    assert laws.petaflop_s_days(8.64e19) == pytest.approx(1)


def test_the_cheapest_ranks_keep_the_deadline():
    times_s = {1: 100.0, 2: 55.0, 4: 30.0, 8: 22.0}
    assert laws.cheapest(times_s, 0.01, 1000) == (1, pytest.approx(1.0))
    assert laws.cheapest(times_s, 0.01, 40) == (4, pytest.approx(1.2))
    with pytest.raises(UsageError, match="no number of ranks keeps 10 s; the fastest takes 22 s"):
        laws.cheapest(times_s, 0.01, 10)
