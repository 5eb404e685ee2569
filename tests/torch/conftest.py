"""The shim is built once, into the package, before the first test that needs it."""

from __future__ import annotations

import pytest

from pycoll import torch_build

torch = pytest.importorskip("torch", reason="needs torch")


@pytest.fixture(scope="session", autouse=True)
def shim_is_built() -> None:
    # The cache of the tests is a new one each time.
    found = torch_build.Torch.find()
    assert found is not None
    torch_build.find_or_build(found, torch_build.package_folder())
    import pycoll.torch  # noqa: F401
