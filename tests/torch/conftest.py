"""The shim is built once, into the package, before the first test that needs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import pycoll

torch = pytest.importorskip("torch", reason="needs torch")


@pytest.fixture(scope="session", autouse=True)
def shim_is_built() -> None:
    # By its file, as setup.py loads it: `import pycoll.torch` would build into the cache.
    path = Path(pycoll.__file__).parent / "torch" / "build.py"
    spec = importlib.util.spec_from_file_location("pycoll_torch_build", path)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = build  # dataclasses look their module up
    spec.loader.exec_module(build)
    build.find_or_build(build.Torch.find(), path.parent)
    importlib.import_module("pycoll.torch")
