"""The devices of the tests: the emulated one always, real ones where there are some."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "comm"))  # oracles of the collectives

LIBRARIES = [pytest.param("threads"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """Built in the folder that the core was built in, where that is still there."""
    if given := os.environ.get("PYCOLL_TEST_DEVICE_LIBRARY"):
        return Path(given)
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed: the emulated device cannot be built")
    folders = [ROOT / "build" / name for name in ("cmake", "dev")]
    folder = next((f for f in folders if (f / "CMakeCache.txt").is_file()), ROOT / "build/device")
    if not (folder / "CMakeCache.txt").is_file():
        ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = [cmake, "-S", ROOT, "-B", folder, *ninja, "-DPYCOLL_PYTHON=OFF"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    build = [cmake, "--build", folder, "--parallel", "2", "--target", "device_threads"]
    done = subprocess.run(build, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder / "_device_threads.so"


def found_devices() -> list[dict[str, object]]:
    """Of the library beside the core; asked in a process of its own, since ranks are forked."""
    code = "import json; from pycoll import _core; print(json.dumps(_core.device_info()))"
    env = {name: text for name, text in os.environ.items() if name != "PYCOLL_DEVICE_LIBRARY"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, text=True, capture_output=True, timeout=60
    )
    return json.loads(done.stdout)["devices"] if done.returncode == 0 else []


@pytest.fixture(scope="module", params=LIBRARIES, autouse=True)
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """The library that device arrays of the test's ranks belong to."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "threads":
            path = request.getfixturevalue("emulated_library")
            patch.setenv("PYCOLL_DEVICE_LIBRARY", str(path))
        else:
            patch.delenv("PYCOLL_DEVICE_LIBRARY", raising=False)
            if not found_devices():
                pytest.skip("no GPU, or no CUDA part of pycoll, on this machine")
        yield request.param


@pytest.fixture
def emulated(library: str) -> None:
    """For what the emulated device alone can be told to do."""
    if library != "threads":
        pytest.skip("the emulated device only")


@pytest.fixture(scope="module")
def kind(library: str) -> str:
    """torch's name of the device. Building takes longer than a test may, on a busy machine."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from pycoll import torch_build

    found = torch_build.Torch.find()
    assert found is not None
    torch_build.find_or_build(found, torch_build.package_folder())
    if library == "cuda":
        if not torch.backends.cuda.is_built():
            pytest.skip("this torch is built without CUDA")
        return "cuda"
    import torch_emulated

    torch_emulated.install()
    return torch_emulated.NAME
