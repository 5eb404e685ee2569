"""pycoll: collectives written once as data; proved, simulated, drawn and executed.

comm = pycoll.init()
comm.all_reduce(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import pycoll._core  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "pycoll._core":
        raise
    from pycoll.missing_core import explanation

    raise ImportError(explanation(), name="pycoll._core") from None

from pycoll import schedule
from pycoll._core import ANY_SOURCE
from pycoll.communicator import Communicator, Work, init
from pycoll.errors import (
    AbortedError,
    CollectiveMismatchError,
    CudaError,
    DataError,
    Error,
    MpiError,
    PeerDiedError,
    SystemError,
    TimeoutError,
    UsageError,
)
from pycoll.launch import run_ranks
from pycoll.ops import premul

if TYPE_CHECKING:
    from pycoll import topology
    from pycoll.elastic.resize import join

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "AbortedError",
    "CollectiveMismatchError",
    "Communicator",
    "CudaError",
    "DataError",
    "Error",
    "MpiError",
    "PeerDiedError",
    "SystemError",
    "TimeoutError",
    "UsageError",
    "Work",
    "init",
    "join",
    "premul",
    "run_ranks",
    "schedule",
    "topology",
]


def __getattr__(name: str) -> Any:
    """Imports `topology` and `join` at their first use, so that ranks start faster."""
    import importlib

    if name == "topology":
        return importlib.import_module("pycoll.topology")
    if name == "join":
        return importlib.import_module("pycoll.elastic.resize").join
    raise AttributeError(f"module 'pycoll' has no attribute {name!r}")
