"""Runs a function in a process of its own, with a deadline: it may crash or hang."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

_NOTE_BYTES = 256


class Notes:
    """What each rank does at present, in memory that the caller shares with its processes."""

    def __init__(self, n: int) -> None:
        self._memory = mmap.mmap(-1, n * _NOTE_BYTES)
        self._n = n
        self.num_done = np.frombuffer(mmap.mmap(-1, 8 * n), np.int64)  # by rank

    def set(self, rank: int, text: str) -> None:
        data = text.encode(errors="replace")[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
        self._memory[rank * _NOTE_BYTES : (rank + 1) * _NOTE_BYTES] = data

    def __str__(self) -> str:
        parts = [self._memory[i * _NOTE_BYTES : (i + 1) * _NOTE_BYTES] for i in range(self._n)]
        return "; ".join(part.rstrip(b"\0").decode(errors="replace") for part in parts)


def run_isolated(fn: Callable[[], Any], deadline_s: float) -> tuple[Any, str]:
    """Calls `fn` in a forked process.

    Returns:
        What it returned, and what is wrong: that it raised, crashed, or did not end before the
        deadline; empty: nothing. Its own processes have ended.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            os.setsid()
            try:
                outcome = (fn(), "")
            except BaseException:
                outcome = (None, traceback.format_exc())
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(write)
    data, is_over = b"", False
    end_s = time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector, os.fdopen(read, "rb", 0) as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while not is_over and selector.select(max(0.0, end_s - time.monotonic())):
            part = pipe.read(1 << 16)
            data += part
            is_over = not part
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not is_over:
        return None, f"no end within {deadline_s:g} s"
    if not data:
        number = os.waitstatus_to_exitcode(status)
        return None, f"killed by {signal.Signals(-number).name}" if number < 0 else "no outcome"
    return pickle.loads(data)
