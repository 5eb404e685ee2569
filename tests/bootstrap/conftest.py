"""Ranks as forked processes, and ports that no other process is given."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pycoll._core import bootstrap


@dataclass(frozen=True)
class Outcome:
    """What a forked rank returned, or the error that it raised."""

    value: Any = None
    error: str = ""  # name of the exception's type
    text: str = ""
    rank: int = -1  # of a PeerDiedError
    signal: int = 0
    seconds: float = 0.0
    num_fds_leaked: int = 0


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _run(fn: Callable[[], Any]) -> Outcome:
    num_fds = num_open_fds()
    start = time.monotonic()
    value, error = None, {}
    try:
        value = fn()
    except BaseException as raised:
        error = {
            "error": type(raised).__name__,
            "text": str(raised),
            "rank": getattr(raised, "rank", -1),
            "signal": getattr(raised, "signal", 0),
        }
    seconds = time.monotonic() - start
    leaked = num_open_fds() - num_fds
    return Outcome(value=value, seconds=seconds, num_fds_leaked=leaked, **error)


class Ranks:
    """Forks processes, one call each, and collects their outcomes."""

    def __init__(self) -> None:
        self._readers: dict[int, int] = {}  # pid -> pipe

    def start(self, fn: Callable[[], Any]) -> int:
        """Runs `fn` in a forked process; returns its pid."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(reader)
                os.write(writer, pickle.dumps(_run(fn)))
            os._exit(0)
        os.close(writer)
        self._readers[pid] = reader
        return pid

    def outcome(self, pid: int) -> Outcome:
        """Waits for the process; an Outcome without type or value if it was killed."""
        with os.fdopen(self._readers.pop(pid), "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        return pickle.loads(data) if data else Outcome(error="killed")

    def run(self, fn: Callable[[int], Any], ranks: range | list[int]) -> list[Outcome]:
        """Runs `fn(rank)` in one process per rank."""
        pids = [self.start(lambda rank=rank: fn(rank)) for rank in ranks]
        return [self.outcome(pid) for pid in pids]

    def end(self) -> None:
        for pid in list(self._readers):
            os.kill(pid, 9)
            self.outcome(pid)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.end()


@pytest.fixture
def port() -> Iterator[int]:
    """A loopback port; bound here without listening, so that the kernel gives it to no other."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.fixture
def server() -> Iterator[bootstrap.TcpStoreServer]:
    running = bootstrap.TcpStoreServer("127.0.0.1", 0, "secret")
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def no_litter() -> Iterator[None]:
    """No test here leaves a descriptor behind."""
    num_fds = num_open_fds()
    yield
    assert num_open_fds() == num_fds


def wait_until_listening(name: str) -> None:
    """Waits for the abstract socket `name`."""
    deadline = time.monotonic() + 10
    while True:
        with open("/proc/net/unix") as sockets:
            for line in sockets:
                flags, path = line.split()[3], line.split()[-1]
                if path == f"@{name}" and flags == "00010000":  # it accepts connections
                    return
        assert time.monotonic() < deadline
        time.sleep(0.005)
