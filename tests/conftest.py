"""What holds for the whole test run: nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def shared_memory_of_this_user() -> set[str]:
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if entry.stat().st_uid == os.getuid()}


def child_processes() -> dict[int, str]:
    """Running or waiting to be reaped: either way somebody forgot them."""
    children = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            children[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return children


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_at_the_end() -> Iterator[None]:
    """No process, and no file in /dev/shm of pycoll or of what it was compared with."""
    shared_memory, children = shared_memory_of_this_user(), child_processes()
    yield
    deadline = time.monotonic() + 5
    while child_processes().keys() - children.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = {pid: line for pid, line in child_processes().items() if pid not in children}
    assert not left, f"processes are left: {left}"
    new_files = shared_memory_of_this_user() - shared_memory
    assert not new_files, f"files are left in /dev/shm: {new_files}"
