"""Threads that the package starts."""

from __future__ import annotations

import threading

from pycoll.errors import SystemError


def start(thread: threading.Thread, what: str) -> None:
    """Starts a thread.

    Args:
        thread: The thread, not started yet.
        what: Its purpose, for the error: "the thread of ...".

    Raises:
        SystemError: The system has no thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise SystemError(f"{what} did not start: {error} (see ulimit -u, pids.max)") from None
