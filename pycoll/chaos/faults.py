"""Faults of a process: each function injects one, and returns when it is over.

`pycoll chaos` injects them into a training's ranks, and tests/fuzz/injections into its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable

_SLOW_STOPPED_S, _SLOW_RUNNING_S = 0.009, 0.001


def kill(pid: int, lasts_s: float) -> None:
    """Kills the process."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, lasts_s: float) -> None:
    """Stops the process for a while."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(lasts_s)
    os.kill(pid, signal.SIGCONT)


def slow(pid: int, lasts_s: float) -> None:
    """Lets the process run for a tenth of the time, for a while."""
    end_s = time.monotonic() + lasts_s
    while time.monotonic() < end_s:
        stop(pid, _SLOW_STOPPED_S)
        time.sleep(_SLOW_RUNNING_S)


def disk(pid: int, lasts_s: float) -> None:
    """Lets no file of the process grow for a while: writes fail, as on a full disk."""
    _, most = limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    time.sleep(lasts_s)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


FAULTS: dict[str, Callable[[int, float], None]] = {
    "kill": kill,
    "stop": stop,
    "slow": slow,
    "disk": disk,
}


def inject(kind: str, pid: int, lasts_s: float = 0.0) -> None:
    """Injects a fault of FAULTS; does nothing to a process that has ended."""
    with contextlib.suppress(ProcessLookupError):
        FAULTS[kind](pid, lasts_s)


__all__ = ["FAULTS", "inject"]
