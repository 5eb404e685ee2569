"""Ranks of the tests: worlds that are started once for a module, and processes that may be killed.

`@on_ranks(2, 3)` makes a test of a function of a communicator: it runs on worlds of 2 and of 3
ranks, as processes and as threads, and the test fails with the errors of all of them. The ranks of
a world are started when the first test of a module needs them; every test gets a new communicator
from a split.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

import pycoll
from pycoll.launch.processes import World

Comm = pycoll.Communicator


def serve(comm: Comm, requests: list[tuple[Connection, Connection]]) -> None:
    """Runs on each rank: the functions that the test asks for, each in a new communicator."""
    ours = requests[comm.rank][1]
    ours.send("ready")
    while (request := ours.recv()) is not None:
        fn, args = request
        try:
            with comm.split(0) as part:
                reply = (True, getattr(fn, "rank_function", fn)(part, *args))
            ours.send(reply)
        except BaseException as error:
            is_echo = isinstance(error, (pycoll.PeerDiedError, pycoll.AbortedError))
            ours.send((False, (is_echo, time.monotonic(), comm.rank, traceback.format_exc())))


class StartedWorld:
    """Ranks that wait for functions to run."""

    def __init__(self, n: int, kind: str) -> None:
        self._pipes = [Pipe() for _ in range(n)]
        options = {"threads": kind == "threads", "return_errors": True}
        self._thread = threading.Thread(
            target=pycoll.run_ranks, args=(serve, n, self._pipes), kwargs=options, daemon=True
        )
        with pytest.MonkeyPatch.context() as patch:
            if kind == "parts":
                patch.setenv("PYCOLL_PEER_MEMORY", "0")
            self._thread.start()
            for ours, _ in self._pipes:
                self._reply(ours)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """What `fn(comm, *args)` returns on each rank; an AssertionError if a rank raises."""
        for ours, _ in self._pipes:
            ours.send((fn, args))
        replies = [self._reply(ours) for ours, _ in self._pipes]
        failures = sorted(error for ok, error in replies if not ok)
        if failures:
            others = ", ".join(str(rank) for _, _, rank, _ in failures[1:])
            text = f"ranks {others} raised, too" if others else "no other rank raised"
            raise AssertionError(f"rank {failures[0][2]} ({text}):\n{failures[0][3]}")
        return [result for _, result in replies]

    def _reply(self, ours: Connection) -> Any:
        while not ours.poll(1):
            assert self._thread.is_alive(), "the world has ended"
        return ours.recv()

    def end(self) -> None:
        for ours, _ in self._pipes:
            ours.send(None)
        self._thread.join(30)
        for pipe in self._pipes:
            for connection in pipe:
                connection.close()
        assert not self._thread.is_alive(), "a rank still runs a function"


_started: dict[tuple[int, str], StartedWorld] = {}


def end_worlds() -> None:
    while _started:
        _started.popitem()[1].end()


def run(fn: Callable[..., Any], n: int, *args: Any, kind: str = "processes") -> list[Any]:
    """`fn(comm, *args)` on n ranks of a started world; fn is at the top level of a test module."""
    if (n, kind) not in _started:
        _started[n, kind] = StartedWorld(n, kind)
    try:
        return _started[n, kind].run(fn, args)
    except BaseException:
        _started.pop((n, kind)).end()  # a rank may still use what it has
        raise


def impatient(fn: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """`fn(comm, ...)` with a short timeout, which begins when the ranks have met: that takes longer
    on a busy machine."""

    @functools.wraps(fn)
    def run(comm: Comm, *args: Any) -> Any:
        comm.timeout_s = timeout_s
        return fn(comm, *args)

    return run


def on_ranks(
    *both: int,
    processes: Sequence[int] = (),
    threads: Sequence[int] = (),
    parts: Sequence[int] = (),
    own: bool = False,
    needs: str = "",
    env: dict[str, str] | None = None,
    timeout_s: float = 0.0,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function of a communicator; its other parameters are fixtures.

    Args:
        *both: numbers of ranks, which are processes first, then threads.
        processes: numbers of ranks that are processes only.
        threads: numbers of ranks that are threads only.
        parts: numbers of ranks that are processes and move large messages in parts, through the
            mailbox, instead of from memory to memory.
        own: starts ranks for this test alone: it changes or inspects their process.
        needs: a module without which the test is skipped; implies `own`.
        env: environment variables of the ranks; implies `own`.
        timeout_s: that of the ranks' waits, if it is not 0; see `impatient`; implies `own`.
        **options: of `pycoll.run_ranks`; implies `own`.
    """
    worlds = [(n, "processes") for n in (*both, *processes)]
    worlds += [(n, "threads") for n in (*both, *threads)] + [(n, "parts") for n in parts]

    def make(fn: Callable[..., Any]) -> Callable[..., None]:
        work = impatient(fn, timeout_s) if timeout_s else fn

        def test(**fixtures: Any) -> None:
            if needs:
                pytest.importorskip(needs, reason=f"needs {needs}")
            failures = []
            for n, kind in worlds:
                try:
                    if not (own or needs or env or timeout_s or options):
                        run(test, n, *fixtures.values(), kind=kind)
                        continue
                    with pytest.MonkeyPatch.context() as patch:
                        for name, value in (env or {}).items():
                            patch.setenv(name, value)
                        is_local = kind == "threads"
                        pycoll.run_ranks(work, n, *fixtures.values(), threads=is_local, **options)
                except Exception as error:
                    cause = error.__cause__ or error
                    failures.append(f"{n} {kind}: {type(error).__name__}: {cause}")
            assert not failures, "\n\n".join(failures)

        functools.update_wrapper(test, fn)
        _, *fixtures = inspect.signature(fn).parameters.values()
        test.__signature__ = inspect.Signature(fixtures)
        test.rank_function = fn
        return test

    return make


# --- ranks that may be killed ---


@dataclass
class Process:
    pid: int
    pipe: int


def start(fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 20) -> list[Process]:
    """`fn(comm, *args)` on that many ranks; with size 0, `fn(*args)` in one process beside them."""
    world = World(max(size, 1))
    processes = []
    for rank in range(max(size, 1)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read)
                os.environ.pop("PYCOLL_TOKEN", None)
                if size:
                    os.environ.update(world.environment(rank))
                    os.environ.pop("PYCOLL_TOKEN")  # newcomers have no launcher that gives it
                    outcome = fn(pycoll.init(timeout_s=timeout_s), *args)
                else:
                    outcome = fn(*args)
                status = 0
            except BaseException:
                outcome = traceback.format_exc()
            with os.fdopen(write, "wb") as pipe:
                pickle.dump((status, outcome), pipe)
            os._exit(0)
        os.close(write)
        processes.append(Process(pid, read))
    world.close()
    return processes


def end(processes: list[Process]) -> list[Any]:
    """What each returned, or how it was killed; fails with the traceback of one that raised."""
    outcomes: list[Any] = []
    failures = []
    for process in processes:
        with os.fdopen(process.pipe, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(process.pid, 0)
        if os.WIFSIGNALED(status):
            outcomes.append(f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
        elif not data:
            outcomes.append(None)  # it went by os._exit
        else:
            failed, outcome = pickle.loads(data)
            failures += [outcome] if failed else []
            outcomes.append(outcome)
    assert not failures, "\n".join(failures)
    return outcomes
