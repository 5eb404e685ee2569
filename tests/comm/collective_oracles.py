"""The table of collectives of the core, and the oracles of all but the barrier."""

from __future__ import annotations

from pycoll import _core
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments, is_reduced_alike, roots_of, run

__all__ = ["INFO", "ORACLES", "arguments", "is_reduced_alike", "roots_of", "run"]

INFO = {row.name: row for row in _core.collectives()}
