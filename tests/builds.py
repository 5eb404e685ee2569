"""Builds of the C++ part beside the package, that tests make; their folders are kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = {"thread": "thread", "address": "address,undefined"}
# The address checks of templates take the compiler five times as long with any optimisation.
OPTIMISATION = {"thread": "-O1", "address": "-O0"}


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
    here = Path(sys.executable).parent  # as the package was built with
    found = shutil.which(name, path=f"{here}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def configure(build: Path, *options: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    command = [tool("cmake"), "-S", ROOT, "-B", build, *generator, "-DPYCOLL_PYTHON=OFF"]
    command.append(f"-DPYCOLL_MPI_INCLUDE={sys.prefix}/include")  # without it there is no MPI
    done = run(*command, *options)
    assert done.returncode == 0, done.stdout


def build(folder: Path, target: str, *options: str, timeout_s: float = 400) -> str:
    """What the build said; `options`: given to CMake before it, for the folder to keep."""
    with open(folder / "tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if options:
            done = run(tool("cmake"), *options, folder)
            assert done.returncode == 0, done.stdout
        command = [tool("cmake"), "--build", folder, "--parallel", "2", "--target", target]
        done = run(*command, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def plain() -> Path:
    """The folder that the package was built in: what is compiled there is not compiled again."""
    folders = [ROOT / "build" / name for name in ("cmake", "dev", "check-plain")]
    folder = next((f for f in folders if (f / "CMakeCache.txt").is_file()), folders[-1])
    if folder == folders[-1]:
        configure(folder)
    return folder


def sanitized(kind: str, dtypes: str = "few", weakened: Path | None = None) -> Path:
    """A build for one of SANITIZERS, configured but not built.

    `dtypes` of the device checks: few or all. `weakened`: folders of headers. See
    tests/cpp/CMakeLists.txt.
    """
    folder = ROOT / "build" / f"check-{kind}"
    # Files are compiled eight at a time, in half the time.
    options = ["-DPYCOLL_TESTS=ON", f"-DPYCOLL_SANITIZE={SANITIZERS[kind]}"]
    options += ["-DCMAKE_UNITY_BUILD=ON", f"-DPYCOLL_CHECK_DTYPES={dtypes}"]
    options += [f"-DPYCOLL_WEAKENED={weakened or ''}"]
    options += ["-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={OPTIMISATION[kind]}"]
    configure(folder, *options)
    return folder


def need_sanitizer(kind: str, folder: Path) -> None:
    """Skips where the compiler cannot do it; `folder` is for a program that tries."""
    (folder / "probe.cc").write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX", "c++")
    flags = [f"-fsanitize={SANITIZERS[kind]}", "probe.cc", "-o", "probe"]
    done = run(tool(compiler), *flags, cwd=folder)
    if done.returncode != 0 or run(folder / "probe").returncode != 0:
        pytest.skip(f"{compiler} cannot build or run with -fsanitize={SANITIZERS[kind]}")
