"""explain() is stable text.

PYCOLL_UPDATE_GOLDEN=1 writes the files anew, so that a change is read in the diff.
"""

import os
from pathlib import Path

import pytest
from cases import each_case

from pycoll import _core, schedule

pytestmark = pytest.mark.pure

GOLDEN = Path(__file__).parent / "golden"
ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]


@each_case("collective, name", ALGORITHMS)
def test_explain_equals_the_golden_file(collective, name):
    text = schedule.build(collective, name, 4).explain()
    path = GOLDEN / f"{collective}_{name}_4.txt"
    if os.environ.get("PYCOLL_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_has_an_algorithm():
    expected = {f"{collective}_{name}_4.txt" for collective, name in ALGORITHMS}
    assert {path.name for path in GOLDEN.glob("*.txt")} == expected
