"""The shim is built once, into the package, before any test module imports pycoll.torch."""

from __future__ import annotations

import pytest

from pycoll import torch_build

torch = pytest.importorskip("torch", reason="needs torch")

# Not in a fixture: building takes longer than a test may, on a busy machine.
_found = torch_build.Torch.find()
assert _found is not None
torch_build.find_or_build(_found, torch_build.package_folder())
