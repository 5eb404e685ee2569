"""The table of phases in docs/cuda.md is counted in lowered programs; a phase delays no message."""

from __future__ import annotations

import os
import re
from pathlib import Path

import device_phases
import pytest

from pycoll import _core

pytestmark = pytest.mark.pure

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cuda.md"


def test_table_of_phases_is_counted_in_the_programs():
    """PYCOLL_UPDATE_GOLDEN=1 writes it anew, so that a change is read in the diff."""
    marks = re.compile(r"(<!-- phases -->\n)(.*?)(<!-- /phases -->)", re.DOTALL)
    expected = device_phases.table()
    if os.environ.get("PYCOLL_UPDATE_GOLDEN"):
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(marks.sub(lambda m: m[1] + expected + m[3], text))
    (found,) = marks.findall(DOCUMENT.read_text())
    assert found[1] == expected


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_phases_make_no_chain_of_messages_longer(n):
    for row in _core.algorithms():
        before = device_phases.meetings(row.collective, row.name, n, phases=False)
        after = device_phases.meetings(row.collective, row.name, n)
        assert after.rounds == before.rounds, (row.collective, row.name)
        assert after.phases <= before.phases and after.fences <= before.fences


def test_two_rounds_take_three_phases_with_any_number_of_ranks():
    """More ranks than a phase has steps need more phases."""
    for n in range(3, device_phases.MAX_PHASE_STEPS + 2):
        counted = device_phases.meetings("all_reduce", "two_shot", n)
        assert counted == device_phases.Meetings(phases=3, barriers=counted.barriers, fences=4,
                                                 rounds=2)  # fmt: skip
    assert device_phases.meetings("all_reduce", "two_shot", 34).phases == 5
