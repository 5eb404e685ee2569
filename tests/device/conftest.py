"""The devices of the tests: the emulated one always, real ones where there are some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import builds
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "comm"))  # oracles of the collectives

LIBRARIES = [pytest.param("threads"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """Built in the folder that the core was built in, where that is still there."""
    if given := os.environ.get("PYCOLL_TEST_DEVICE_LIBRARY"):
        return Path(given)
    folder = builds.plain()
    builds.build(folder, "device_threads")
    return folder / "_device_threads.so"


def found_devices() -> list[dict[str, object]]:
    """The devices of the library beside the core. A process of its own asks: ranks are forked."""
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


@pytest.fixture(scope="module")
def two_devices(library: str) -> Iterator[None]:
    """Two emulated devices with room for the blocks of many communicators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOLL_DEVICE_THREADS_COUNT", "2")
        patch.setenv("PYCOLL_DEVICE_THREADS_PROCESSORS", "256")
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    if "kind" in getattr(item, "fixturenames", ()):
        item.add_marker("first")


def has_used_a_device() -> bool:
    """Whether this process has opened the emulated device, or a GPU's context."""
    if "_device_threads.so" in Path("/proc/self/maps").read_text():
        return True
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return any(file.startswith("/dev/nvidia-uvm") for file in files)


@pytest.fixture(autouse=True)
def process_of_the_tests_uses_no_device() -> Iterator[None]:
    """Ranks of later tests are forked from this process, and could not use a device."""
    before = has_used_a_device()
    yield
    assert before or not has_used_a_device(), "this test used a device in pytest's process"


@pytest.fixture
def emulated(library: str) -> None:
    """For what the emulated device alone can be told to do."""
    if library != "threads":
        pytest.skip("the emulated device only")


@pytest.fixture
def ranks_may_be_killed(library: str) -> None:
    """A process that is killed while its kernel runs may take the server of MPS along."""
    if library == "cuda" and not found_devices()[0]["takes_turns"]:
        pytest.skip("not under MPS")


@pytest.fixture(scope="module")
def kind(library: str) -> str:
    """torch's name of the device. Building takes longer than a test may, on a busy machine. The
    ranks install it, not this process: once its autograd knew such a device, it would look for the
    library in later tests, too."""
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

    torch_emulated.build()
    return torch_emulated.NAME
