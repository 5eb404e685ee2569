"""Rules of the whole test run: nothing is left behind, and the cost of each folder is printed."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import child_pids, shared_memory_files


def child_processes() -> dict[int, str]:
    """Children that run or wait to be reaped, with their command lines."""
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

# Ranks that are threads use one arena of memory, which can be given back. With several arenas
# the freed ends stay: hundreds of MB, whose page tables each later fork copies.
libc = ctypes.CDLL(None)
M_ARENA_MAX = -8
libc.mallopt(M_ARENA_MAX, 1)

TIERS = ("slow", "soak", "timing")
costs_s: collections.Counter[str] = collections.Counter()  # by folder of tests
num_tests: collections.Counter[str] = collections.Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `first` come first. Those of the slower tiers have five minutes each, unless
    they have a timeout."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        slower = any(item.get_closest_marker(tier) for tier in TIERS)
        if slower and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = Path(report.nodeid.partition("::")[0]).parts
    folder = f"{parts[0]}/{parts[1]}" if len(parts) > 2 else "tests/*.py"
    costs_s[folder] += report.duration
    num_tests[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds of each folder, dearest first: CONTRIBUTING has a budget for each."""
    if len(costs_s) < 2:
        return
    terminalreporter.section("seconds by folder")
    for folder, cost_s in costs_s.most_common():
        terminalreporter.line(f"{cost_s:8.1f} s {num_tests[folder]:6d} tests  {folder}")


@pytest.fixture(scope="session", autouse=True)
def no_table_and_no_rules_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Selection as built in, and no test writes into a home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("PYCOLL_ALGO", raising=False)
        yield


@pytest.fixture
def registered_schedules_are_forgotten() -> Iterator[None]:
    """For tests that register algorithms of their own."""
    from pycoll import schedule

    before = dict(schedule._registered)
    yield
    schedule._registered.clear()
    schedule._registered.update(before)


@pytest.fixture(scope="module", autouse=True)
def files_of_tests_start_without_garbage() -> Iterator[None]:
    """A test that counts descriptors must not see those close that an earlier one left in a cycle.
    Frozen objects are never looked at again: else a collection takes half a second with torch."""
    gc.collect()
    gc.freeze()
    yield
    libc.malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_at_the_end() -> Iterator[None]:
    """No process, and no file in /dev/shm of ours."""
    files, children = shared_memory_files(), child_processes()
    yield
    deadline = time.monotonic() + 20
    # Another worker may still run a test, whose files go away with it.
    while time.monotonic() < deadline:
        left = {pid: line for pid, line in child_processes().items() if pid not in children}
        new_files = shared_memory_files() - files
        if not left and not new_files:
            break
        time.sleep(0.05)
    assert not left, f"processes are left: {left}"
    assert not new_files, f"files are left in /dev/shm: {new_files}"
