"""Makes the oracles, jobs, networks and worlds of other folders known here."""

from __future__ import annotations

from collections.abc import Iterator

import injections
import pytest

injections.add_test_folders()


@pytest.fixture(scope="module", autouse=True)
def worlds_of_a_module_end_with_it() -> Iterator[None]:
    from worlds import end_worlds

    yield
    end_worlds()
