"""Ends the worlds that the tests of a module have started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import end_worlds


@pytest.fixture(scope="module", autouse=True)
def worlds_of_a_module_end_with_it() -> Iterator[None]:
    yield
    end_worlds()
