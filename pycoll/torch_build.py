"""Builds the shim, the extension module that uses torch's C++ API, for the installed torch.

setup.py uses this file before pycoll can be imported, so it imports nothing of pycoll. It does not
import torch either: it reads the version and paths from torch's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-Wno-unused-parameter", "-DTORCH_EXTENSION_NAME=_shim", "-D_GLIBCXX_USE_CXX11_ABI=1"),
)
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")


@dataclass(frozen=True, slots=True)
class Torch:
    """A torch installation."""

    folder: Path
    version: str

    @staticmethod
    def find() -> Torch | None:
        """Finds the installation that `import torch` would use, without importing it."""
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(spec.submodule_search_locations[0])
        try:
            facts = (folder / "version.py").read_text()
        except OSError:
            return None
        # Nightly builds share a version number, so the commit is needed too.
        found = re.findall(r"^(?:__version__|git_version)[^=]*= *['\"](.*)['\"]", facts, re.M)
        return Torch(folder, " ".join(found))


def package_folder() -> Path:
    """Folder of the package pycoll.torch, where installed shims are."""
    return Path(__file__).resolve().parent / "torch"


def source_folder() -> Path:
    """Folder of the shim's sources: in the package, or beside it in a checkout."""
    shipped = package_folder() / "csrc"
    return shipped if shipped.is_dir() else package_folder().parents[1] / "csrc"


def source_files(folder: Path) -> list[Path]:
    """Source files of the shim."""
    return [folder / "capi" / "pycoll.h", *sorted((folder / "torch").rglob("*.[ch]*"))]


def file_name(torch: Torch, sources: Path) -> str:
    """File name of the shim, unique to this Python, this torch and these sources."""
    key = hashlib.sha256(repr((torch.version, _FLAGS, sysconfig.get_config_var("SOABI"))).encode())
    for path in source_files(sources):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"_shim.{key.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Folder of the shims that are built at run time: the one of the measured tables."""
    if given := os.environ.get("PYCOLL_CACHE_DIR"):
        return Path(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "pycoll"
    return Path.home() / ".cache" / "pycoll"


def find(torch: Torch, only: Path | None = None) -> Path | None:
    """Finds the shim for this torch in the package or the cache, or only in the folder `only`."""
    name = file_name(torch, source_folder())
    for folder in (only,) if only else (package_folder(), cache_folder()):
        if (folder / name).is_file():
            return folder / name
    return None


def state() -> str:
    """One line of text: whether the backend is built for the installed torch."""
    torch = Torch.find()
    if torch is None:
        return "no torch found"
    version = torch.version.split()[0]
    path = find(torch)
    if path is None:
        return f"not built for torch {version} yet: `import pycoll.torch` builds it"
    return f"built for torch {version}: {path}"


def find_or_build(torch: Torch, folder: Path | None = None) -> Path:
    """Finds the shim for this torch, or builds it.

    Args:
        torch: The torch installation.
        folder: The folder of the shim; None: the package or the cache.

    Returns:
        The file of the extension module.

    Raises:
        RuntimeError: There is no compiler, it failed, or the cache cannot be written.

    Cost: about half a minute, once; one rank builds, and the other ranks wait for it.
    """
    found = find(torch, folder)
    if found is not None:
        return found
    only, folder = folder, folder or cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "_shim.lock"):
            for left in folder.glob("shim-*"):  # left by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            return find(torch, only) or build(torch, source_folder(), folder)
    except OSError as error:
        raise RuntimeError(
            f"pycoll: cannot write the torch backend to {folder}: {error}; set PYCOLL_CACHE_DIR "
            "to a writable folder"
        ) from error


def build(torch: Torch, sources: Path, into: Path) -> Path:
    """Compiles the shim.

    Args:
        torch: The torch installation.
        sources: The folder csrc.
        into: The folder of the module.

    Returns:
        The module's file.

    Raises:
        RuntimeError: There is no compiler, or it failed; the message contains its output.
    """
    target = into / file_name(torch, sources)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError(
            "pycoll: building the torch backend needs a C++ compiler: install g++ 12 or later, or "
            "set CXX"
        )
    print(
        f"pycoll: building the backend for torch {torch.version.split()[0]} (once, about a minute)",
        file=sys.stderr,
        flush=True,
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=into, prefix="shim-") as work:
        # One translation unit: torch's headers take longer to compile than pycoll's sources.
        unity = Path(work) / "shim.cc"
        files = sorted(path.relative_to(sources) for path in (sources / "torch").rglob("*.cc"))
        unity.write_text("".join(f'#include "{path}"\n' for path in files))
        made = Path(work) / target.name
        include = torch.folder / "include"
        command = [
            *compiler.split(),
            *_FLAGS,
            f"-I{sources}",
            *("-isystem", str(include)),
            *("-isystem", str(include / "torch" / "csrc" / "api" / "include")),
            *("-isystem", sysconfig.get_paths()["include"]),
            str(unity),
            *("-o", str(made)),
            f"-L{torch.folder / 'lib'}",
            *_LIBRARIES,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"pycoll: building the torch backend failed:\n{' '.join(command)}\n{done.stderr}"
            )
        os.replace(made, target)  # atomic: other processes see no file or a complete one
    print(f"pycoll: built {target} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """A lock between processes; a killed process releases it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
