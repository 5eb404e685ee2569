"""Forked processes that compute values ahead of the process that asks for them.

Invariant: a value is the one that the asking process would compute itself. Whatever a worker cannot
deliver, because it failed or ended, is computed there, and fails there with its own error.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

from pycoll.communicator import open_communicators
from pycoll.launch.processes import RankProcess, end_all

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_QUEUED = 2  # keys that a worker is sent ahead, so that it never waits for the next one
_AHEAD = 4  # values of each worker that may wait until they are taken


def usable_workers() -> int:
    """Number of processes that may be forked: one for each core, if there are several.

    0 where a fork is not safe: beside other threads, communicators with other ranks, torch's
    process groups, or devices, whose threads and connections a child would share.
    """
    cores = len(os.sched_getaffinity(0))
    groups = torch.distributed.is_available() and torch.distributed.is_initialized()
    others = any(comm.size > 1 for comm in open_communicators())
    if cores == 1 or threading.active_count() > 1 or groups or others:
        return 0
    return 0 if torch.cuda.device_count() else cores


class Workers(Generic[K, V]):
    """Computes expected values in forked processes, which see this process as it was at the start.

    A worker is forked for the first key that no other one is free for. None outlives this process
    (RankProcess), and Ctrl-C reaches this process only. As a context manager it ends them.
    """

    def __init__(self, work: Callable[[K], V], count: int) -> None:
        """Prepares workers.

        Args:
            work: Computes a value, which pickle can copy.
            count: Most workers; 0: every value is computed by the caller of `take`.
        """
        self._work, self._count = work, count
        self._expected: Iterator[K] = iter(())
        self._most = 0
        self._asked: dict[Connection, list[K]] = {}
        self._values: dict[K, V] = {}
        self._seen: set[K] = set()
        self._processes: list[RankProcess] = []

    def __enter__(self) -> Workers[K, V]:
        return self

    def __exit__(self, *error: object) -> None:
        end_all(self._processes, grace_s=0)
        for connection in self._asked:
            connection.close()
        self._asked.clear()
        self._count = 0

    def expect(self, keys: Iterable[K]) -> None:
        """Replaces the keys that are computed ahead, in the order in which they will be taken."""
        if self._count:
            self._expected = iter(keys)
            self._most = self._ahead() + _AHEAD * self._count  # values never taken take no place
            self._ask()

    def take(self, key: K) -> V:
        """Returns the value of a key: from a worker that was asked for it, else computed here."""
        self._ask()
        while key not in self._values and any(key in asked for asked in self._asked.values()):
            for connection in wait([of for of, asked in self._asked.items() if asked]):
                self._receive(connection)  # type: ignore[arg-type]
            self._ask()
        self._seen.add(key)
        return self._values.pop(key) if key in self._values else self._work(key)

    def _ask(self) -> None:
        """Gives keys to workers until each has some."""
        while self._count and self._ahead() < self._most:
            free = min(self._asked, key=lambda of: len(self._asked[of]), default=None)
            may_fork = len(self._asked) < self._count
            if free is not None and len(self._asked[free]) >= _QUEUED and not may_fork:
                return
            key = next((key for key in self._expected if key not in self._seen), None)
            if key is None:
                return
            if (free is None or self._asked[free]) and may_fork:
                free = self._fork()
            assert free is not None
            self._seen.add(key)
            try:
                free.send(key)
                self._asked[free].append(key)
            except OSError:
                self._lose(free)

    def _ahead(self) -> int:
        return len(self._values) + sum(map(len, self._asked.values()))

    def _fork(self) -> Connection:
        mine, other = Pipe()

        def body() -> int:
            torch.set_num_threads(1)  # the threads of the parent's pool do not exist here
            gc.freeze()  # what the parent had made is not looked through again
            for connection in (mine, *self._asked):
                connection.close()
            while True:
                try:
                    other.send(_attempt(self._work, other.recv()))
                except (EOFError, OSError):
                    return 0

        RankProcess.start(len(self._processes), body, into=self._processes)
        other.close()
        self._asked[mine] = []
        return mine

    def _receive(self, connection: Connection) -> None:
        try:
            done, value = connection.recv()
        except (EOFError, OSError):
            self._lose(connection)
            return
        key = self._asked[connection].pop(0)
        if done:
            self._values[key] = value

    def _lose(self, connection: Connection) -> None:
        """Goes on without a worker that has ended."""
        del self._asked[connection]
        connection.close()
        self._count -= 1


def _attempt(work: Callable[[Any], Any], key: Any) -> tuple[bool, Any]:
    """Whether a value could be computed, and the value; the error is raised where it is taken."""
    try:
        return True, work(key)
    except Exception:
        return False, None


__all__ = ["Workers", "usable_workers"]
