"""accelerate and Lightning train with the backend by its name, as one process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from torch_ranks import BACKEND
from torchrun import torchrun

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

FOLDER = Path(__file__).parent / "frameworks"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "num_ranks"), [("accelerate", 3), ("lightning", 2)])
def test_framework_trains_as_one_process(framework, num_ranks):
    """By name alone: torch finds the backend through the entry point of the installed package."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install -e '.[frameworks]'")
    found = [point.name for point in importlib.metadata.entry_points(group="torch.backends")]
    if BACKEND not in ("gloo", *found):
        pytest.skip("pycoll is not installed, so that torch does not know its name")
    output = torchrun(num_ranks, FOLDER / f"with_{framework}.py", BACKEND)
    assert f"{framework}: 20 steps, " in output, output
