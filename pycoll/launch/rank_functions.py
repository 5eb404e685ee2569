"""run_ranks: runs a function on every rank of a world on this host, for tests and notebooks."""

from __future__ import annotations

import fcntl
import os
import pickle
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pycoll import _core
from pycoll.arguments import flag, seconds, shown, whole_number
from pycoll.errors import AbortedError, Error, PeerDiedError, UsageError
from pycoll.launch.processes import RankProcess, World, describe_exit, device_queues, end_all
from pycoll.threads import start as start_thread

_GRACE_S = 5.0  # after the first failure, for the other ranks to report their own
_LEAVE_S = 1.0  # time for rank threads to notice that their communicators are closed
_DEFAULT_TIMEOUT_S = 60.0


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    threads: bool = False,
    timeout_s: float | None = None,
    return_errors: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Calls `fn(comm, *args, **kwargs)` on n ranks and waits for all of them.

    Processes are forked, so `fn` may be a closure or a function of a notebook, and uses the modules
    that the caller has loaded. A fork does not copy threads: if torch is loaded, a rank limits it
    to one thread (its pool would wait for missing threads), and a caller that has initialised CUDA
    must use `pycoll run` instead. No rank outlives the call or the caller.

    Args:
        fn: function that every rank runs; `comm` is its Communicator, closed when fn returns.
        n: number of ranks.
        *args: passed to fn.
        threads: run ranks as threads of this process instead of processes.
        timeout_s: timeout in seconds of every wait of the communicators; None: their default.
        return_errors: return the exception of a failed rank in place of its result instead of
            raising, and let every other rank finish.
        **kwargs: passed to fn.

    Returns:
        The results of fn, in rank order. Processes send them pickled.

    Raises:
        Exception: the exception of a rank, of its own type if that can be pickled (else
            pycoll.Error), caused by a RankError with the rank's traceback. If several ranks fail,
            the first exception that is not a consequence of another rank's end.
        PeerDiedError: a rank was killed by a signal.
        UsageError: n is not from 1 to 256, or fn is no function.

    Cost: a few milliseconds per process, and one copy of every result.
    """
    if not callable(fn):
        raise UsageError(f"run_ranks: fn is {shown(fn)}, expected a function")
    n = whole_number(n, "run_ranks: n", 1, _core.max_ranks)
    if timeout_s is not None:
        timeout_s = seconds(timeout_s)
    run = _Threads if flag(threads, "threads") else _Processes
    return_errors = flag(return_errors, "return_errors")
    outcomes = run(lambda comm: fn(comm, *args, **kwargs), n, timeout_s, return_errors).outcomes()
    failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
    if failures and not return_errors:
        raise _root_cause(failures).error
    return [o.error if isinstance(o, _Failure) else o.result for o in outcomes]


class RankError(Error):
    """The cause of an exception that a rank raised: the rank and its traceback."""


@dataclass(frozen=True, slots=True)
class _Success:
    result: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
    time_s: float  # monotonic clock, which all processes of a host share
    echo: bool = False  # only a consequence of another rank's end

    @classmethod
    def raised(cls, error: Exception, name: str, text: str, time_s: float) -> _Failure:
        """Failure from a rank's exception, with the rank and its traceback as the cause."""
        error.__cause__ = RankError(f"raised by {name}:\n{text}")
        return cls(error, time_s, echo=isinstance(error, (PeerDiedError, AbortedError)))


def _root_cause(failures: list[_Failure]) -> _Failure:
    return min(failures, key=lambda failure: (failure.echo, failure.time_s))


def _init_options(timeout_s: float | None) -> dict[str, Any]:
    return {} if timeout_s is None else {"timeout_s": timeout_s}


# Ranks as processes.


class _Inbox:
    """The parent's end of the pipe with a rank's outcome."""

    def __init__(self) -> None:
        self.fd, self.write_end = os.pipe()
        os.set_blocking(self.fd, False)
        self._received: list[bytes] = []

    def drain(self) -> bool:
        """Reads the available bytes of the pipe; False at its end."""
        try:
            while part := os.read(self.fd, 1 << 20):
                self._received.append(part)
        except BlockingIOError:
            return True
        return False

    def take(self) -> bytes:
        message = b"".join(self._received)
        self._received.clear()
        return message


class _Processes:
    def __init__(
        self,
        call: Callable[[Any], Any],
        n: int,
        timeout_s: float | None,
        return_errors: bool,
    ) -> None:
        self._call = call
        self._timeout_s = timeout_s
        # With return_errors every rank reports, so each gets the full timeout to fail by itself.
        patience_s = _DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._grace_s = _GRACE_S + (patience_s if return_errors else 0.0)
        self._world = World(n)
        self._processes: list[RankProcess] = []
        self._inboxes: list[_Inbox] = []

    def outcomes(self) -> list[_Success | _Failure]:
        try:
            for rank in range(self._world.size):
                self._start(rank)
            return self._collect()
        finally:
            end_all(self._processes, grace_s=0)
            self._world.close()
            for inbox in self._inboxes:
                os.close(inbox.fd)

    def _start(self, rank: int) -> None:
        inbox = _Inbox()
        self._inboxes.append(inbox)
        try:
            RankProcess.start(rank, lambda: self._rank_main(rank), into=self._processes)
        finally:
            os.close(inbox.write_end)

    def _rank_main(self, rank: int) -> int:
        """Main function of the child process."""
        write_end = self._inboxes[rank].write_end
        for inbox in self._inboxes:
            os.close(inbox.fd)
        for process in self._processes:
            os.close(process.pidfd)
        os.environ.update(self._world.environment(rank))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        try:
            import pycoll

            with pycoll.init(**_init_options(self._timeout_s)) as comm:
                result = self._call(comm)
            message = pickle.dumps(_Success(result), protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            message = pickle.dumps(_Report.of(error, f"rank {rank} of {self._world.size}"))
        with suppress(OSError):
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 1 << 20)
        unsent = memoryview(message)
        while unsent:
            unsent = unsent[os.write(write_end, unsent) :]
        return 0

    def _collect(self) -> list[_Success | _Failure]:
        """Reads all pipes concurrently, so that no rank waits until another's result is read."""
        outcomes: dict[int, _Success | _Failure] = {}
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            for process, inbox in zip(self._processes, self._inboxes, strict=True):
                selector.register(inbox.fd, selectors.EVENT_READ, inbox)
                selector.register(process.pidfd, selectors.EVENT_READ, process)
            while len(outcomes) < self._world.size:
                wait_s = None if deadline is None else deadline - time.monotonic()
                if wait_s is not None and wait_s <= 0:
                    break
                for key, _ in selector.select(wait_s):
                    if isinstance(key.data, _Inbox):
                        if not key.data.drain():
                            selector.unregister(key.fd)
                        continue
                    selector.unregister(key.fd)
                    outcome = self._outcome(key.data)
                    outcomes[key.data.rank] = outcome
                    if isinstance(outcome, _Failure) and deadline is None:
                        deadline = time.monotonic() + self._grace_s
        return [outcomes.get(rank) or self._overdue(rank) for rank in range(self._world.size)]

    def _outcome(self, process: RankProcess) -> _Success | _Failure:
        """Outcome of a rank that has exited."""
        status, now = process.exit_status() or 0, time.monotonic()
        name = f"rank {process.rank} of {self._world.size}"
        inbox = self._inboxes[process.rank]
        inbox.drain()
        message = inbox.take()
        if status < 0:
            text = f"run_ranks: {name} {describe_exit(status)}"
            return _Failure(PeerDiedError(text, process.rank, -status), now)
        if status > 0 or not message:
            what = describe_exit(status)
            return _Failure(Error(f"run_ranks: {name} {what} before its function returned"), now)
        try:
            outcome = pickle.loads(message)
        except Exception as error:
            return _Failure(
                Error(f"run_ranks: cannot unpickle the result of {name}: {error!r}"), now
            )
        return outcome.failure() if isinstance(outcome, _Report) else outcome

    def _overdue(self, rank: int) -> _Failure:
        message = (
            f"run_ranks: rank {rank} of {self._world.size} was still running {self._grace_s:g} s "
            "after the first failure, and was ended"
        )
        return _Failure(AbortedError(message), time.monotonic(), echo=True)


@dataclass(frozen=True, slots=True)
class _Report:
    """Picklable form of a failure: pickling drops tracebacks and causes."""

    pickled: bytes
    name: str
    traceback: str
    time_s: float

    @classmethod
    def of(cls, error: BaseException, name: str) -> _Report:
        now = time.monotonic()
        text = "".join(traceback.format_exception(error))
        plain = _raisable(error, name)
        try:
            pickled = pickle.dumps(plain)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(_stand_in(error, name))
        return cls(pickled, name, text, now)

    def failure(self) -> _Failure:
        error = pickle.loads(self.pickled)
        return _Failure.raised(error, self.name, self.traceback, self.time_s)


def _raisable(error: BaseException, name: str) -> Exception:
    """Wraps exceptions such as SystemExit, which end a rank but must not end the caller."""
    return error if isinstance(error, Exception) else _stand_in(error, name)


def _stand_in(error: BaseException, name: str) -> Error:
    return Error(f"{name} raised {type(error).__qualname__}: {error}")


# Ranks as threads.


class _Threads:
    def __init__(
        self,
        call: Callable[[Any], Any],
        n: int,
        timeout_s: float | None,
        return_errors: bool,
    ) -> None:
        self._call = call
        self._n = n
        self._timeout_s = timeout_s

    def outcomes(self) -> list[_Success | _Failure]:
        from pycoll.launch.local_ranks import local_communicators

        os.environ.update(device_queues())
        comms = local_communicators(self._n, **_init_options(self._timeout_s))
        outcomes: list[Any] = [None] * self._n

        # Not told from Thread.join: one that a KeyboardInterrupt has ended takes a running thread
        # for an ended one (Python 3.11).
        ended = [threading.Event() for _ in range(self._n)]

        def rank_main(rank: int) -> None:
            try:
                with comms[rank] as comm:
                    outcomes[rank] = _Success(self._call(comm))
            except BaseException as error:
                outcomes[rank] = self._failure(rank, error)
            finally:
                ended[rank].set()

        # Daemon threads, so that the process can end after a KeyboardInterrupt.
        ranks = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self._n)
        ]
        num_started = 0
        try:
            for thread in ranks:
                start_thread(thread, f"the thread of {thread.name}")
                num_started += 1
            for event in ended:
                event.wait()
        except BaseException:
            for comm in comms:
                comm.close()
            # A thread that returns from the core while the interpreter ends aborts the process.
            deadline = time.monotonic() + _LEAVE_S
            for event in ended[:num_started]:
                event.wait(max(0.0, deadline - time.monotonic()))
            raise
        for thread in ranks:
            thread.join()
        return outcomes

    def _failure(self, rank: int, error: BaseException) -> _Failure:
        name = f"rank {rank} of {self._n}"
        text = "".join(traceback.format_exception(error))
        return _Failure.raised(_raisable(error, name), name, text, time.monotonic())
