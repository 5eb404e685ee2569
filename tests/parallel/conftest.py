"""Ranks fork off this process, so imports that all of them need are done here, once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - torch's optimizers import it when they are first made: seconds

pytest.register_assert_rewrite("mesh_cases")
sys.path.append(str(Path(__file__).parents[1] / "comm"))  # worlds whose ranks may be killed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder that is not pure: it starts ranks, which use torch."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("pure"):
            item.add_marker("torch")
            item.add_marker("ranks")
