"""The errors that pycoll raises. A message says what failed, what was expected, and where."""

from __future__ import annotations

import builtins


class Error(Exception):
    """Base of every error of pycoll."""


class UsageError(Error, ValueError):
    """The caller asked for something that cannot be done."""


class SystemError(Error, OSError):
    """The operating system refused something."""


class CudaError(Error):
    """CUDA refused something."""


class MpiError(Error):
    """MPI refused something."""


class TimeoutError(Error, builtins.TimeoutError):
    """A peer did not come, or did not move on, before the deadline."""


class PeerDiedError(Error):
    """A peer's process ended, or a peer left, while it was still needed.

    Attributes:
        rank: The peer.
        signal: The signal that ended its process, 0 when that is not known.
    """

    def __init__(self, message: str, rank: int = -1, signal: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.signal)


class CollectiveMismatchError(Error):
    """Two ranks entered the same operation with different calls."""


class AbortedError(Error):
    """The communicator was broken by an earlier error, here or on another rank."""
