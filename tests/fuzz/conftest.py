"""Makes the oracles, jobs, networks and worlds of other folders known here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("comm", "hosts", "parallel", "bootstrap", "torch")
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in FOLDERS]


@pytest.fixture(scope="module", autouse=True)
def worlds_of_a_module_end_with_it() -> Iterator[None]:
    from worlds import end_worlds

    yield
    end_worlds()
