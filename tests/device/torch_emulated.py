"""The emulated device as a device of torch, "emulated": built once, and registered."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycoll import torch_build

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("torch_emulated.cc")
NAME = "emulated"


def build() -> Path:
    """The extension for this torch; kept, since its headers take half a minute."""
    found = torch_build.Torch.find()
    assert found is not None
    sources = SOURCE.read_bytes() + (ROOT / "csrc" / "device" / "device_table.h").read_bytes()
    key = hashlib.sha256(sources + found.version.encode()).hexdigest()[:16]
    target = ROOT / "build" / "torch_device" / f"_emulated.{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    include = found.folder / "include"
    made = target.with_suffix(f".{os.getpid()}")
    command = [
        *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=_emulated"),
        f"-I{ROOT / 'csrc'}",
        *("-isystem", include, "-isystem", include / "torch" / "csrc" / "api" / "include"),
        *("-isystem", sysconfig.get_paths()["include"]),
        *(SOURCE, "-o", made, f"-L{found.folder / 'lib'}"),
        *("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    os.replace(made, target)
    return target


class Device:
    """The module torch.emulated, which torch.get_device_module returns: as torch.cuda."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """What is random is made on the host."""

    def device_count(self) -> int:
        return self._extension.device_count()

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def num_host_copies(self) -> int:
        """Tensors that the program has copied between the host and a device."""
        return self._extension.num_host_copies()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(torch.device(device).index or 0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, self.current_device()))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        return torch.Event(NAME)

    def CUDAGraph(self) -> Any:
        """By that name, as torch.cuda's."""
        return self._extension.Graph()

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize()


def install() -> None:
    """Makes "emulated" a device of torch, and one that the backend serves. Once."""
    if hasattr(torch, NAME):
        return
    path = build()
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location(
        "_emulated", loader=ExtensionFileLoader("_emulated", str(path))
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._register_device_module(NAME, Device(module))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    import pycoll.torch  # noqa: F401  registers the backend

    dist.Backend.backend_capability["pycoll"].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "pycoll"
