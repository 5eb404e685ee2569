"""The errors that pycoll raises. A message says what failed, what was expected, and where."""

from __future__ import annotations

import builtins


class Error(Exception):
    """Base of every error of pycoll."""


class UsageError(Error, ValueError):
    """An argument, a setting or a call is invalid."""


class SystemError(Error, OSError):
    """A call of the operating system failed."""


class CudaError(Error):
    """A call of CUDA failed."""


class MpiError(Error):
    """A call of MPI failed."""


class TimeoutError(Error, builtins.TimeoutError):
    """A peer did not make its call, or made no progress, before the deadline."""


class PeerDiedError(Error):
    """A peer's process ended, or a peer left, while it was still needed.

    Attributes:
        rank: Rank of the peer.
        signal: The signal that ended its process, 0 when that is not known.
    """

    def __init__(self, message: str, rank: int = -1, signal: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.signal)


class DataError(Error):
    """Bytes changed on their way from one rank to another. Only PYCOLL_CHECK_DATA=1 finds it."""


class CollectiveMismatchError(Error):
    """Two ranks entered the same operation with different calls."""


class AbortedError(Error):
    """The communicator was broken by an earlier error, here or on another rank."""
