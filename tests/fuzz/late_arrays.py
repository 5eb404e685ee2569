"""Arrays of every kind for the tries with late ranks, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import pycoll
from pycoll.arrays.device import DeviceArray

Comm = pycoll.Communicator


class Array:
    """An array of float32: what the operations get, and a view of it for the checks."""

    is_on_device = False
    is_reached_by_kernels = False  # of all ranks

    def __init__(self, given: Any, view: np.ndarray) -> None:
        self.given = given
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def fill(self, value: float) -> None:
        self._view[:] = value

    def values(self) -> np.ndarray:
        return self._view

    def other_than(self, expected: float | np.ndarray) -> int:
        """Number of elements that differ from `expected`."""
        return int((self.values() != expected).sum())


class OnDevice(Array):
    """Is copied to the CPU for the checks."""

    is_on_device = True

    def __init__(self, given: DeviceArray, is_registered: bool) -> None:
        super().__init__(given, np.empty(given.shape, np.float32))
        self.is_reached_by_kernels = is_registered

    def fill(self, value: float) -> None:
        self._view[:] = value
        self.given.copy_from(self._view)

    def values(self) -> np.ndarray:
        return self.given.numpy()


def plain(comm: Comm, count: int) -> Array:
    comm.register_after = 0
    return adopted(comm, count)


def adopted(comm: Comm, count: int) -> Array:
    """The registration cache takes it after some uses."""
    x = np.ones(count, np.float32)
    return Array(x, x)


def registered(comm: Comm, count: int) -> Array:
    x = np.ones(count, np.float32)
    comm.register(x)
    return Array(x, x)


def heap(comm: Comm, count: int) -> Array:
    x = comm.empty(count, np.float32)
    return Array(x, x)


def of_torch(comm: Comm, count: int) -> Array:
    import torch

    x = torch.ones(count)
    return Array(x, x.numpy())


def device(comm: Comm, count: int) -> Array:
    return OnDevice(DeviceArray.empty(count), False)


def device_registered(comm: Comm, count: int) -> Array:
    return OnDevice(comm.register(DeviceArray.empty(count)), True)


def device_shared(comm: Comm, count: int) -> Array:
    return OnDevice(comm.empty(count, np.float32, device=0), True)


ARRAYS: dict[str, Callable[[Comm, int], Array]] = {
    "plain": plain,
    "adopted": adopted,
    "registered": registered,
    "heap": heap,
    "torch": of_torch,
    "device": device,
    "device-registered": device_registered,
    "device-shared": device_shared,
}
DEVICE_ARRAYS = tuple(name for name in ARRAYS if name.startswith("device"))
