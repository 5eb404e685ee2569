"""Arrays in device memory, for programs without another library of device arrays."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arguments import shown
from pycoll.arrays.memory import dtype_name, numpy_dtype, sizes_and_bytes
from pycoll.errors import UsageError

_MAX_DIGITS = 9  # of the number of a device, which is a C int


class DeviceArray:
    """A contiguous array on a device, with `__cuda_array_interface__`.

    torch, CuPy, numba and the collectives use it without a copy. pycoll's operations on it run in
    the order of the stream `stream` (0: the default stream).
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
        """Makes an array of zeros in new memory.

        Args:
            shape: Shape of the array.
            dtype: A NumPy dtype, or a name such as "f32" or "bf16".
            device: Number of the device.
            stream: Stream of its operations.

        Returns:
            The array.

        Raises:
            UsageError: The device or the device library does not exist.
            CudaError: The device has no memory left.
        """
        sizes, nbytes = sizes_and_bytes(shape, dtype)
        return cls(_core.DeviceMemory(device, nbytes), sizes, dtype, stream=stream)

    @classmethod
    def of(cls, array: Any, device: int = 0, stream: int = 0) -> DeviceArray:
        """Copies a CPU array to a device."""
        array = np.ascontiguousarray(array)
        made = cls.empty(array.shape, array.dtype, device, stream)
        made.copy_from(array)
        return made

    @property
    def device(self) -> int:
        """Number of the device."""
        return self.memory.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def copy_from(self, array: Any) -> None:
        """Overwrites the array with a CPU array of equal size, in the order of the stream."""
        array = np.ascontiguousarray(array)
        if array.nbytes != self.nbytes:
            raise UsageError(f"the array has {array.nbytes} bytes, expected {self.nbytes}")
        if array.nbytes:
            self.memory.copy_from_host(array.reshape(-1).view(np.uint8), self._offset, self.stream)

    def numpy(self) -> np.ndarray:
        """Copies the array to the host, after the queued work of its stream."""
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self.memory.copy_to_host(host.reshape(-1).view(np.uint8), self._offset, self.stream)
        return host

    def part(self, first: int, count: int) -> DeviceArray:
        """A view of `count` elements, from the flat element `first` on."""
        if not 0 <= first <= first + count <= math.prod(self.shape):
            raise UsageError(f"elements {first}..{first + count} are not all within the array")
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
    """Makes an uninitialised array of `num_rows` rows like `x`, with x's library if possible.

    Args:
        x: A device array without a method new_empty.
        num_rows: Size of the first axis.

    Returns:
        A CuPy array if x is one, else a DeviceArray.
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
        memory: Memory of at least the array's size.
        shape: Shape of the array.
        dtype: As in `Communicator.empty`.

    Returns:
        A torch tensor for a torch dtype, else a DeviceArray.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return DeviceArray(memory, shape, dtype)
    as_bytes = torch.utils.dlpack.from_dlpack(memory.__dlpack__())
    return as_bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def device_number(device: Any) -> int:
    """The number that `device` means: an int, "cuda", "cuda:1", or a torch.device.

    If another package adds a device to torch, its name stands for the devices of pycoll's library.
    """
    try:
        text = str(device)
    except TypeError:  # of its own method
        text = "?"
    torch = sys.modules.get("torch")
    kinds = "cuda" if torch is None else f"cuda|{torch._C._get_privateuse1_backend_name()}"
    found = re.fullmatch(rf"(?:{kinds})?:?([0-9]{{0,{_MAX_DIGITS}}})", text)
    if found is None:
        raise UsageError(
            f"device is {shown(device)}, expected a number, or a name such as 'cuda:0'"
        )
    return int(found[1] or 0)


__all__ = ["DeviceArray"]
