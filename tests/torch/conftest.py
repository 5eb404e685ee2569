"""The shim is built once, into the package, before any test module imports pycoll.torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pycoll import torch_build

torch = pytest.importorskip("torch", reason="needs torch")

# Not in a fixture: building takes longer than a test may, on a busy machine.
_found = torch_build.Torch.find()
assert _found is not None
torch_build.find_or_build(_found, torch_build.package_folder())

from torch_ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The processes of every test that is declared with on_ranks."""
    started = Ranks()
    yield started
    started.close()
