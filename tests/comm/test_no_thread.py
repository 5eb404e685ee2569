"""A thread that cannot start is an error with its name, and the other ranks hear of it."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import Comm

import pycoll
from pycoll.threads import start as start_thread

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Leaves too little address space for the stack of a thread: root may have any number."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
    end = threading.Event()
    try:
        # A process that was forked has kept the stacks of its parent's threads.
        with contextlib.suppress(RuntimeError):
            while True:
                threading.Thread(target=end.wait, daemon=True).start()
        yield
    finally:
        end.set()
        resource.setrlimit(resource.RLIMIT_AS, before)


def error_of(operation: Callable[[], Any]) -> str:
    with pytest.raises(pycoll.Error) as raised:
        operation()
    return f"{type(raised.value).__name__}: {raised.value}"


def start_without_thread(comm: Comm, what: str) -> str:
    x = np.ones(1 << 18)
    if comm.rank == 1:
        if what == "message":
            return error_of(lambda: comm.recv(x, 0, tag=1))  # is not sent
        return error_of(comm.barrier)
    with without_threads():
        if what == "message":
            first = error_of(lambda: comm.send(x, 1, async_op=True))
        else:
            first = error_of(lambda: comm.all_reduce(x, async_op=True))
    if what == "message":
        time.sleep(0.5)  # the other rank hears of it before this rank ends
    return first


def test_asynchronous_operation_without_a_thread_is_an_error_on_all_ranks():
    for what, noun in [("message", "messages"), ("operation", "operations")]:
        own, others = pycoll.run_ranks(start_without_thread, 2, what)
        text = f"the thread of asynchronous {noun} did not start: Resource temporarily unavailable"
        assert own == f"SystemError: {text} (see ulimit -u, pids.max)"
        if what == "message":
            reason = f"rank 0 aborted the communicator: {text} (see ulimit -u, pids.max)"
            assert others.startswith("AbortedError: ") and others.endswith(reason), others
        else:
            assert others.startswith("PeerDiedError: "), others  # nothing was begun


def test_python_thread_without_resources_is_an_error_that_names_it(monkeypatch):
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(pycoll.SystemError, match=r"the thread of the port did not start: can't"):
        start_thread(threading.Thread(), "the thread of the port")
