"""Ranks as child processes that never outlive the process that started them.

Every rank leads its own process group, so that Ctrl-C in a terminal reaches only the parent, and
ending a rank also ends the processes that it has started. An exited rank is reaped only after its
group has been signalled, so that the id cannot belong to another process before that.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_POLL_S = 0.01
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def device_queues() -> dict[str, str]:
    """The environment variable with CUDA's greatest number of hardware queues, unless it is set.

    Streams that share a queue hold each other up, and kernels of ranks wait for each other. CUDA
    reads the variable when a process first uses a device.
    """
    return {} if _QUEUES in os.environ else {_QUEUES: "32"}


@dataclass(frozen=True, slots=True)
class World:
    """The shared environment of one launch's ranks: the address of rank 0, and a secret token.

    A socket that is bound but does not listen reserves the port until `close`; rank 0 can still
    listen there, because both sockets set SO_REUSEADDR.
    """

    size: int
    reservation: socket.socket = field(default_factory=lambda: _reserve_port())
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def close(self) -> None:
        """Releases the port."""
        self.reservation.close()

    def environment(self, rank: int) -> Mapping[str, str]:
        """Environment variables for `pycoll.init` on this rank."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.reservation.getsockname()[1]),
            "PYCOLL_TOKEN": self.token,
            **device_queues(),
        }


@dataclass(slots=True)
class RankProcess:
    """A child process; `pidfd` becomes readable when it exits."""

    rank: int
    pid: int
    pidfd: int
    reaped: bool = False

    @classmethod
    def start(cls, rank: int, body: Callable[[], int], into: list[RankProcess]) -> None:
        """Forks a child that runs `body` and exits with the status it returns.

        The child is forked, so that the body may be a closure or a function of a notebook. It ends
        with `os._exit`, so that it does not run the parent's `atexit` functions.

        Args:
            rank: rank of the child.
            body: function that the child runs.
            into: list to which the child is appended before a KeyboardInterrupt can occur, so that
                ending the processes of the list misses none.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns when a process with threads forks. run_ranks describes how the
                # child handles it.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _run_child(body, parent, before)
            with suppress(OSError):  # the child does it too, so the order does not matter
                os.setpgid(pid, pid)
            into.append(cls(rank, pid, os.pidfd_open(pid)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def exit_status(self) -> int | None:
        """The exit status, or minus the signal that killed the child; None while it runs."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        info = os.waitid(os.P_PID, self.pid, flags)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def send(self, signum: int) -> None:
        """Signals the rank and the processes that it has started."""
        if not self.reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def reap(self) -> None:
        """Reaps an exited rank, after sending SIGTERM to the processes that it left behind."""
        if not self.reaped:
            self.send(signal.SIGTERM)
            os.waitid(os.P_PID, self.pid, os.WEXITED)
            self.reaped = True
            os.close(self.pidfd)


def end_all(processes: Iterable[RankProcess], grace_s: float) -> None:
    """Ends ranks and the processes that they have started; returns when all have ended.

    Args:
        processes: the ranks; those already reaped are left alone.
        grace_s: seconds between SIGTERM and SIGKILL; 0 kills at once.
    """
    left = [p for p in processes if not p.reaped]
    try:
        if grace_s > 0:
            for process in left:
                process.send(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and any(p.exit_status() is None for p in left):
                time.sleep(_POLL_S)
    finally:
        for process in left:
            if process.exit_status() != 0:  # after a success, reap sends SIGTERM to the group
                process.send(signal.SIGKILL)
        for process in left:
            process.reap()


def describe_exit(status: int) -> str:
    """Text such as `exited with status 3` or `was killed by SIGKILL`."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal_name(-status)}"


def signal_name(signum: int) -> str:
    """Name such as `SIGKILL`, or `signal 35` for a signal without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _run_child(body: Callable[[], int], parent: int, sigmask: set[int]) -> NoReturn:
    status = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        _die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, sigmask)
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def _reserve_port() -> socket.socket:
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation
