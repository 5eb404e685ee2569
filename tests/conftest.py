"""What holds for the whole test run: nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import child_pids

# Of MPI jobs that may run at the same time.
OTHERS = ("sm_segment.", "mpich_shm_", "Intel_MPI_", "psm2_shm.")


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS)}


def child_processes() -> dict[int, str]:
    """Running or waiting to be reaped: either way somebody forgot them."""
    children = {}
    for pid in child_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return children


# A shell starts what runs in the background without these two; tests send them.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

START = time.monotonic()  # about when the run began
SLOW_MINUTES = os.environ.get("PYCOLL_SLOW_MINUTES")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test has five minutes where it does not say otherwise: CI's machine is slower."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where time is limited, as in CI, no slow test begins after it: it says so."""
    used_s = time.monotonic() - START
    if SLOW_MINUTES and item.get_closest_marker("slow") and used_s > 60 * float(SLOW_MINUTES):
        pytest.skip(f"the {SLOW_MINUTES} minutes for slow tests are over: `make test-slow`")


@pytest.fixture(scope="session", autouse=True)
def no_table_and_no_rules_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Selection as built in, and no test writes into a home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("PYCOLL_ALGO", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_at_the_end() -> Iterator[None]:
    """No process, and no file in /dev/shm of ours."""
    files, children = shared_memory_files(), child_processes()
    yield
    deadline = time.monotonic() + 5
    while child_processes().keys() - children.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = {pid: line for pid, line in child_processes().items() if pid not in children}
    assert not left, f"processes are left: {left}"
    new_files = shared_memory_files() - files
    assert not new_files, f"files are left in /dev/shm: {new_files}"
