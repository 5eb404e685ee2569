"""Builds of the C++ part that tests make beside the package, in folders that are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {"plain": "", "thread": "thread", "address": "address,undefined"}
# The address checks of templates take the compiler five times as long with any optimisation.
OPTIMISATION = {"plain": "-O0", "thread": "-O1", "address": "-O0"}


def run(
    *command: object, cwd: Path | None = None, timeout_s: float = 400, **env: str
) -> subprocess.CompletedProcess:
    """Output and errors together, as text; a status other than 0 is the caller's to judge."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def configure(build: Path, *options: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    command = [tool("cmake"), "-S", ROOT, "-B", build, *generator, "-DPYCOLL_PYTHON=OFF"]
    done = run(*command, *options)
    assert done.returncode == 0, done.stdout


def build(folder: Path, target: str, timeout_s: float = 400) -> str:
    command = [tool("cmake"), "--build", folder, "--parallel", "2", "--target", target]
    done = run(*command, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def checks(kind: str, weakened: Path | None = None) -> Path:
    """The build of the C++ checks for one of SANITIZERS, configured but not built.

    `weakened`: folders of headers, see tests/cpp/CMakeLists.txt.
    """
    folder = ROOT / "build" / f"check-{kind}"
    options = ["-DPYCOLL_TESTS=ON", f"-DPYCOLL_SANITIZE={SANITIZERS[kind]}"]
    options += [f"-DPYCOLL_WEAKENED={weakened or ''}"]
    options += ["-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={OPTIMISATION[kind]}"]
    configure(folder, *options)
    return folder


def need_sanitizer(kind: str, folder: Path) -> None:
    """Skips where the compiler cannot do it; `folder` is for a program that tries."""
    if not SANITIZERS[kind]:
        return
    (folder / "probe.cc").write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX", "c++")
    flags = [f"-fsanitize={SANITIZERS[kind]}", "probe.cc", "-o", "probe"]
    done = run(tool(compiler), *flags, cwd=folder)
    if done.returncode != 0 or run(folder / "probe").returncode != 0:
        pytest.skip(f"{compiler} cannot build or run with -fsanitize={SANITIZERS[kind]}")
