"""The extension module between torch and the core, found or built at first use."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

from pycoll.torch_build import Torch, find_or_build

_NAME = "pycoll.torch._shim"


@functools.cache
def load() -> ModuleType:
    """Imports the module.

    Raises:
        ImportError: torch is not installed.
        RuntimeError: The module is missing and cannot be built.

    Cost: a millisecond if it exists; about half a minute to build it, once per torch version.
    """
    torch = Torch.find()
    if torch is None:
        raise ImportError("pycoll.torch needs torch: pip install torch")
    path = str(find_or_build(torch))
    spec = importlib.util.spec_from_file_location(_NAME, loader=ExtensionFileLoader(_NAME, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module
