"""The shim is built once, into the package, before the first test that needs it."""

from __future__ import annotations

import pytest

from pycoll import torch_build

torch = pytest.importorskip("torch", reason="needs torch")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Not in a fixture: building takes longer than a test may, on a busy machine.
    if session.config.option.collectonly:
        return
    found = torch_build.Torch.find()
    assert found is not None
    torch_build.find_or_build(found, torch_build.package_folder())
    import pycoll.torch  # noqa: F401
