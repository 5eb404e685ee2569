"""The places of the arrays of a random program: the kind of memory, and the offset in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import pycoll

KINDS = ("plain", "shared", "registered")  # NumPy's, comm.empty's, comm.register's
MEMORIES = (*KINDS, "mixed", "parents")
# Bytes by which an array is shifted, for elements of so many bytes.
SHIFTS: tuple[Callable[[int], int], ...] = (
    lambda itemsize: 0, lambda itemsize: itemsize, lambda itemsize: 3 * itemsize,
    lambda itemsize: 1,
)  # fmt: skip


class Places:
    """Makes arrays for the calls of one rank."""

    def __init__(self, world: pycoll.Communicator) -> None:
        self.world = world
        self.num_arrays = 0
        self.registered: list[tuple[pycoll.Communicator, np.ndarray]] = []

    def new(
        self, comm: pycoll.Communicator, memory: str, shift: int, shape: Any, dtype: Any
    ) -> np.ndarray:
        """An array of one of MEMORIES; its ranks are shifted differently if it is shifted."""
        self.num_arrays += 1
        owner = self.world if memory == "parents" else comm
        kind = memory
        if memory == "parents":
            kind = KINDS[1 + self.num_arrays % 2]
        elif memory == "mixed":
            kind = KINDS[(comm.rank + self.num_arrays) % len(KINDS)]
        dtype = np.dtype(dtype)
        begin = SHIFTS[shift * (comm.rank + 1) % len(SHIFTS)](dtype.itemsize)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if kind == "shared":
            whole = owner.empty(begin + nbytes, np.uint8)
        else:
            whole = np.empty(begin + nbytes, np.uint8)
        x = whole[begin:].view(dtype).reshape(shape)
        if kind == "registered":
            owner.register(x)
            self.registered.append((owner, x))
        return x

    def unregister(self, keep: int = 0) -> None:
        """All but so many of the arrays, whose operations are over; close() has taken some."""
        last = len(self.registered) - keep
        for owner, x in self.registered[: max(0, last)]:
            if not owner.closed:
                owner.unregister(x)
        del self.registered[: max(0, last)]
