"""Networks of two and of four hosts, made once for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The oracles of the collectives are those of ranks on one host, and the client of the store.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / other) for other in ("comm", "bootstrap"))]

from delayed import DelayedNetwork, why_not_delayed  # noqa: E402
from namespaces import Network, why_not  # noqa: E402

WHY_NOT = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.hosts)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def networks() -> Iterator[Callable[[int], Network]]:
    made: dict[int, Network] = {}

    def network(n: int) -> Network:
        if n not in made:
            made[n] = Network(n)
        return made[n]

    yield network
    for one in made.values():
        one.close()


@pytest.fixture
def two(networks: Callable[[int], Network]) -> Network:
    return networks(2)


@pytest.fixture
def four(networks: Callable[[int], Network]) -> Network:
    return networks(4)


@pytest.fixture
def delayed() -> Iterator[DelayedNetwork]:
    """Two hosts whose packets take as long as the test says."""
    if why := why_not_delayed():
        pytest.skip(why)
    network = DelayedNetwork(2, name=f"pyc{os.getpid()}d")
    yield network
    network.close()
