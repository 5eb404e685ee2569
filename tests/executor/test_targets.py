"""The C++ checks, plain and under sanitizers: programs on hosts and devices, communicators."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sanitizer, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {"plain": "", "thread": "thread", "address": "address,undefined"}
# The address checks of templates take the compiler five times as long with any optimisation.
OPTIMISATION = {"": "-O1", "thread": "-O1", "address,undefined": "-O0"}
REPORTS = ("WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "runtime error:", "LeakSanitizer")


def run(
    *command: object, cwd: Path | None = None, timeout_s: float = 400, **env: str
) -> subprocess.CompletedProcess:
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


def configure(source: Path, build: Path, sanitizer: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    done = run(
        *(tool("cmake"), "-S", source, "-B", build, *generator, "-DPYCOLL_PYTHON=OFF"),
        *("-DPYCOLL_TESTS=ON", f"-DPYCOLL_SANITIZE={sanitizer}"),
        *("-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={OPTIMISATION[sanitizer]}"),
    )
    assert done.returncode == 0, done.stdout


def build(folder: Path, target: str) -> subprocess.CompletedProcess:
    return run(tool("cmake"), "--build", folder, "--parallel", "2", "--target", target)


@pytest.fixture(scope="module", params=SANITIZERS)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build tree with the C++ checks in it, kept between runs."""
    sanitizer = SANITIZERS[request.param]
    if sanitizer:
        probe = tmp_path_factory.mktemp("probe")
        (probe / "probe.cc").write_text("int main() { return 0; }\n")
        compiler = os.environ.get("CXX", "c++")
        flags = [f"-fsanitize={sanitizer}", "probe.cc", "-o", "probe"]
        done = run(tool(compiler), *flags, cwd=probe)
        if done.returncode != 0 or run(probe / "probe").returncode != 0:
            pytest.skip(f"{compiler} cannot build or run with -fsanitize={sanitizer}")
    folder = ROOT / "build" / f"check-{request.param}"
    configure(ROOT, folder, sanitizer)
    done = build(folder, "checks")
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


def check(folder: Path, program: str, *arguments: object, timeout_s: float = 400) -> str:
    done = run(
        folder / "tests/cpp" / program,
        *map(str, arguments),
        timeout_s=timeout_s,
        TSAN_OPTIONS="exitcode=66 halt_on_error=1",
        UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1",
        ASAN_OPTIONS="detect_leaks=1",
    )
    return done.stdout + f"\nexit code {done.returncode}"


def assert_clean(output: str) -> None:
    print(output)
    assert not [report for report in REPORTS if report in output], output[:6000]
    assert ", 0 failures\n" in output
    assert output.endswith("exit code 0")


def test_executor_check_on_2_to_4_ranks_is_right_and_clean(tree):
    assert_clean(check(tree, "executor_check", 2, 3, 4))


def test_device_check_on_3_ranks_is_right_and_clean(tree):
    assert_clean(check(tree, "device_check", "few", 3))


def test_device_failures_are_reported_by_those_that_wait(tree):
    assert_clean(check(tree, "device_failure_check"))


def test_communicator_check_is_right_and_clean(tree):
    assert_clean(check(tree, "communicator_check"))


def test_peer_memory_check_tells_peers_from_strangers(tree):
    assert_clean(check(tree, "peer_memory_check"))


@pytest.mark.slow
def test_executor_check_on_more_ranks_is_right_and_clean(tree):
    assert_clean(check(tree, "executor_check", 1, 5, 6, 7, 8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_device_check_of_every_cell_is_right_and_clean(tree, num_ranks):
    assert_clean(check(tree, "device_check", "all", num_ranks, timeout_s=1700))


def test_layers_link_one_by_one():
    """Every folder as a shared library of itself and what it may use: no symbol is undefined."""
    folder = ROOT / "build" / "check-plain"
    configure(ROOT, folder, "")
    done = build(folder, "layers")
    assert done.returncode == 0, done.stdout[-4000:]


# Each takes an order away: readers may then see a flag before the bytes that it announces.
WEAKENED = {
    "host store_release": (
        "csrc/transport/slot.h",
        "std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);",
        "std::atomic_ref<uint64_t>(word).store(value, std::memory_order_relaxed);",
    ),
    "host load_acquire": (
        "csrc/transport/slot.h",
        ".load(std::memory_order_acquire);",
        ".load(std::memory_order_relaxed);",
    ),
    "device store_release": (
        "csrc/transport/device_slot.h",
        "store(value, PYCOLL_ORDER(release));",
        "store(value, PYCOLL_ORDER(relaxed));",
    ),
    "device load_acquire": (
        "csrc/transport/device_slot.h",
        "load(PYCOLL_ORDER(acquire));",
        "load(PYCOLL_ORDER(relaxed));",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", WEAKENED)
def test_thread_sanitizer_reports_a_missing_order(change, tmp_path):
    """The tests above can fail: with one order weakened there is a report."""
    kept = ROOT / "build" / "check-thread"
    if not (kept / "CMakeCache.txt").is_file():
        pytest.skip("ThreadSanitizer does not work here: see the reason of the tests above")
    for name in ("csrc", "tests/cpp"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    name, right, weakened = WEAKENED[change]
    slot = tmp_path / name
    text = slot.read_text()
    assert right in text
    slot.write_text(text.replace(right, weakened))
    configure(tmp_path, tmp_path / "build", "thread")
    program = ("executor_check", 3) if change.startswith("host") else ("device_check", "few", 3)
    done = build(tmp_path / "build", program[0])
    assert done.returncode == 0, done.stdout[-4000:]
    output = check(tmp_path / "build", *program)
    assert "WARNING: ThreadSanitizer: data race" in output, output
