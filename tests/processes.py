"""Processes that tests start, and files that they may leave behind."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

# Files of other programs at the same time: MPI jobs, pools of Python's multiprocessing.
OTHERS = (
    "sm_segment.",
    "mpich_shm_",
    "Intel_MPI_",
    "psm2_shm.",
    "sem.mp-",
    "cuda.shm.",
    "torch_",
    "nccl-",
)


def _one_thread_of_torch() -> None:
    """Runs in a forked child: it has none of the threads of its parent's pool."""
    if hasattr(torch := sys.modules.get("torch"), "set_num_threads"):
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_one_thread_of_torch)


# Folders of commands while they run.
OF_COMMANDS = ("pycoll-check-", "pycoll-plan-", "pycoll-scale-")


def pycoll_files() -> set[str]:
    """Files named pycoll in /dev/shm and in the folder for temporary files."""
    folders = ("/dev/shm", tempfile.gettempdir())
    names = {name for folder in folders for name in os.listdir(folder)}
    return {name for name in names if "pycoll" in name and not name.startswith(OF_COMMANDS)}


def shared_memory_files() -> set[str]:
    """Files in /dev/shm that may be pycoll's."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS)}


def child_pids() -> set[int]:
    """Children of this process that run or wait to be reaped."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the look.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids.update(int(pid) for pid in (task / "children").read_text().split())
    return pids


def wait_for_pids(folder: Path, count: int) -> list[int]:
    """Waits until so many ranks have written their process ids."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("rank*")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"the ranks did not start: {list(folder.iterdir())}")


def wait_until_gone(pids: list[int]) -> None:
    """Fails when a process still runs after 20 s; a zombie that is not reaped yet is gone."""
    deadline = time.monotonic() + 20
    while running := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
