"""Arrays in memory of a device, for programs that have no other library that makes some."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arrays.memory import dtype_name, numpy_dtype
from pycoll.errors import UsageError


class DeviceArray:
    """A contiguous array on a device, with `__cuda_array_interface__`.

    torch, CuPy and numba take it without a copy; so do the collectives. `stream` (0: the default
    one) is the stream on which it is used: what pycoll does with it comes behind the stream's work.
    """

    def __init__(
        self,
        memory: _core.DeviceMemory,
        shape: Sequence[int],
        dtype: Any,
        *,
        offset: int = 0,
        stream: int = 0,
    ) -> None:
        self.memory = memory
        self.shape = tuple(shape)
        self.dtype = numpy_dtype(dtype)
        self.stream = stream
        self._offset = offset

    @classmethod
    def empty(
        cls, shape: int | Sequence[int], dtype: Any = "f32", device: int = 0, stream: int = 0
    ) -> DeviceArray:
        """An array of zeros of its own.

        Args:
            shape: Of the array.
            dtype: A NumPy dtype, or a name such as "f32" or "bf16".
            device: Its number.
            stream: On which it is used.

        Returns:
            The array.

        Raises:
            UsageError: No such device, or no library for devices.
            CudaError: The device has no memory left.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * numpy_dtype(dtype).itemsize
        return cls(_core.DeviceMemory(device, nbytes), sizes, dtype, stream=stream)

    @classmethod
    def of(cls, array: Any, device: int = 0, stream: int = 0) -> DeviceArray:
        """A copy of a host array, on a device."""
        array = np.ascontiguousarray(array)
        made = cls.empty(array.shape, array.dtype, device, stream)
        made.copy_from(array)
        return made

    @property
    def device(self) -> int:
        """The number of its device."""
        return self.memory.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def copy_from(self, array: Any) -> None:
        """Overwrites it with a host array of as many bytes, behind the work of its stream."""
        array = np.ascontiguousarray(array)
        if array.nbytes != self.nbytes:
            raise UsageError(f"the array has {array.nbytes} bytes, expected {self.nbytes}")
        if array.nbytes:
            self.memory.copy_from_host(array.reshape(-1).view(np.uint8), self._offset, self.stream)

    def numpy(self) -> np.ndarray:
        """A copy on the host, of what it holds behind the work of its stream."""
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self.memory.copy_to_host(host.reshape(-1).view(np.uint8), self._offset, self.stream)
        return host

    def part(self, first: int, count: int) -> DeviceArray:
        """A view of `count` elements, from the flat element `first` on."""
        if not 0 <= first <= first + count <= math.prod(self.shape):
            raise UsageError(f"elements {first}..{first + count} are not all of the array")
        offset = self._offset + first * self.dtype.itemsize
        return DeviceArray(self.memory, (count,), self.dtype, offset=offset, stream=self.stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr, name = self.dtype.str, dtype_name(self.dtype)
        interface: dict[str, Any] = {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.memory.address + self._offset, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or None,
        }
        if typestr[1] == "V" or self.dtype.itemsize == 1 and typestr[1] == "f":
            interface["descr"] = [(name, typestr)]
        return interface

    def __repr__(self) -> str:
        return f"<pycoll.DeviceArray shape {self.shape}, {self.dtype}, device {self.device}>"


def new_like(x: Any, num_rows: int) -> Any:
    """An uninitialised array of so many rows like `x`, by x's library if that can make one.

    Args:
        x: A device array without a method new_empty.
        num_rows: Size of the first axis.

    Returns:
        A CuPy array for one of CuPy, else a DeviceArray.
    """
    shape = (num_rows, *tuple(x.shape)[1:])
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        with x.device:
            return cupy.empty(shape, x.dtype)
    if isinstance(x, DeviceArray):
        return DeviceArray.empty(shape, x.dtype, x.device, x.stream)
    interface = x.__cuda_array_interface__
    return DeviceArray.empty(
        shape,
        np.dtype(interface["typestr"]),
        _core.device_of(interface["data"][0]),
        interface.get("stream") or 0,
    )


def device_array_over(memory: _core.DeviceMemory, shape: Sequence[int], dtype: Any) -> Any:
    """An array of that shape and dtype over the start of `memory`, which it keeps alive.

    Args:
        memory: Of at least as many bytes.
        shape: Of the array.
        dtype: As in `Communicator.empty`.

    Returns:
        A torch tensor for a torch dtype, else a DeviceArray.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return DeviceArray(memory, shape, dtype)
    # As bytes: torch reads no interface of bf16 and fp8 elements.
    as_bytes = DeviceArray(memory, (math.prod(shape) * dtype.itemsize,), "u8")
    return torch.as_tensor(as_bytes, device=f"cuda:{memory.device}").view(dtype).reshape(shape)


def device_number(device: Any) -> int:
    """The number that `device` means: an int, "cuda", "cuda:1", or a torch.device."""
    text = str(device)
    number = text.removeprefix("cuda").removeprefix(":") or "0"
    if not number.isdecimal():
        raise UsageError(f"device is {device!r}, expected a number, or such as 'cuda:0'")
    return int(number)


__all__ = ["DeviceArray"]
