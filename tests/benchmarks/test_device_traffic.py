"""The roofline of docs/cuda.md is counted in lowered programs, and has the closed forms it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import device_traffic
import pytest

pytestmark = pytest.mark.pure

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cuda.md"


def test_table_of_traffic_is_counted_in_the_programs():
    """PYCOLL_UPDATE_GOLDEN=1 writes it anew, so that a change is read in the diff."""
    marks = re.compile(r"(<!-- traffic -->\n)(.*?)(<!-- /traffic -->)", re.DOTALL)
    expected = device_traffic.table()
    if os.environ.get("PYCOLL_UPDATE_GOLDEN"):
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(marks.sub(lambda m: m[1] + expected + m[3], text))
    (found,) = marks.findall(DOCUMENT.read_text())
    assert found[1] == expected


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_traffic_of_all_reduce_has_its_closed_form(n):
    share, link = (3 * n - 2) / n, 2 * (n - 1) / n
    forms = {
        ("ring", False): (share, share, link),
        ("two_shot", False): (share, share, link),
        ("two_shot", True): (1, 1, link),
        ("one_shot", False): (n + 1, n, n - 1),
        ("one_shot", True): (n, 1, n - 1),
    }
    for (name, direct), expected in forms.items():
        counted = device_traffic.traffic("all_reduce", name, n, direct)
        got = (counted.read, counted.written, counted.sent)
        assert got == pytest.approx(expected), (name, direct)
