"""Python stacks of a hanging process, for `pycoll doctor`.

Each process with a communicator asks Python's faulthandler to write the stacks of all its threads
into a memfd on a real-time signal. The handler runs at once, even while the main thread is stuck in
C, and takes no lock. A signal that already has a handler is left alone.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from pycoll import environment
from pycoll.arguments import shown
from pycoll.errors import UsageError

VARIABLE = "PYCOLL_DOCTOR_SIGNAL"
MEMFD_NAME = "pycoll-stacks"
_OFF = ("", "0", "off", "none")


@dataclass(frozen=True, slots=True)
class StackWriter:
    """The signal on which this process writes its stacks, and the file."""

    pid: int
    signum: int
    fd: int


_writer: StackWriter | None = None


def signal_from_text(text: str, variable: str) -> int | None:
    """Parses `SIGUSR2`, `USR2`, `SIGRTMIN+7` or a number; None for off.

    Raises:
        UsageError: there is no such signal.
    """
    name = text.strip().upper()
    if name.lower() in _OFF:
        return None
    if name.isdecimal():
        number = int(name[:9])  # no signal has more digits
    else:
        base, _, more = name.removeprefix("SIG").partition("+")
        try:
            number = int(signal.Signals[f"SIG{base}"]) + int(more or 0)
        except (KeyError, ValueError):
            number = 0
    if not 0 < number < signal.NSIG or number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(
            f"{variable}={shown(text)[1:-1]}: expected a signal such as SIGUSR2, or off"
        )
    return number


def is_handled(pid: int | str, signum: int) -> bool:
    """Whether a process catches or ignores a signal; otherwise the signal may end it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (signum - 1) & 1:
            return True
    return False


def install() -> StackWriter | None:
    """Makes this process write its stacks on a signal. Called once per process.

    Returns:
        The writer; None if it is turned off, or the signal already has a handler.
    """
    global _writer
    if _writer is not None and _writer.pid == os.getpid():
        return _writer
    default = "SIGRTMIN+7"
    signum = signal_from_text(environment.read(VARIABLE) or default, VARIABLE)
    inherited = _writer is not None and _writer.signum == signum  # the writer of the parent process
    if signum is None or (not inherited and is_handled("self", signum)):
        return None
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # the reader may truncate the file
    faulthandler.register(signum, file=fd, all_threads=True, chain=False)
    if inherited and _writer is not None:
        os.close(_writer.fd)
    _writer = StackWriter(os.getpid(), signum, fd)
    return _writer
