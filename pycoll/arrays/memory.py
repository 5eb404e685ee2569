"""Arrays in memory that the ranks of a host access without a copy, for `Communicator.empty`."""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arguments import shown
from pycoll.errors import UsageError

_MAX_DIMS = 32  # NumPy's limit before version 2
_MAX_BYTES = 1 << 47  # addresses of a process

# NumPy's names of pycoll's dtypes where they differ; the later ones need ml_dtypes.
_NUMPY_NAMES = {
    "u8": "uint8", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "f16": "float16",
    "f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128",
}  # fmt: skip
_ML_NAMES = {"bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2"}


def array_over(memory: _core.SharedMemory, shape: Sequence[int], dtype: Any) -> Any:
    """An array of that shape and dtype over the start of `memory`, which it keeps alive.

    Args:
        memory: Memory of at least the array's size.
        shape: Shape of the array.
        dtype: As in `Communicator.empty`.

    Returns:
        A torch tensor for a torch dtype, else a NumPy array.
    """
    count = math.prod(shape)
    if _is_torch(dtype):
        import torch

        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count).reshape(tuple(shape))
    return np.frombuffer(memoryview(memory), numpy_dtype(dtype), count).reshape(tuple(shape))


def item_size(dtype: Any) -> int:
    """Bytes of one element."""
    return dtype.itemsize if _is_torch(dtype) else numpy_dtype(dtype).itemsize


def sizes_and_bytes(shape: Any, dtype: Any) -> tuple[tuple[int, ...], int]:
    """The sizes along all dimensions, and the bytes of the array.

    Raises:
        UsageError: The shape is no integer or sequence of integers, an integer is negative, the
            array is larger than any memory, or the dtype is unknown or has Python objects.
    """
    try:
        sizes = tuple(map(operator.index, shape if np.iterable(shape) else (shape,)))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or len(sizes) > _MAX_DIMS:
        raise UsageError(
            f"shape is {shown(shape)}, expected an integer or a sequence of at most "
            f"{_MAX_DIMS} integers, each 0 or more"
        )
    if not _is_torch(dtype) and (numpy_dtype(dtype).hasobject or not numpy_dtype(dtype).itemsize):
        raise UsageError(f"dtype is {numpy_dtype(dtype)}, expected elements of bytes in memory")
    nbytes = math.prod(sizes) * item_size(dtype)
    if nbytes > _MAX_BYTES:
        raise UsageError(f"shape is {shown(shape)}: {nbytes:.3g} bytes are no array's size")
    return sizes, nbytes


def numpy_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype for a NumPy dtype, its name, or the name of a pycoll dtype.

    Raises:
        UsageError: The dtype is unknown, or needs the package ml_dtypes, which is not installed.
    """
    name = dtype if isinstance(dtype, str) else ""
    if name in _ML_NAMES or name in _ML_NAMES.values():
        try:
            ml_dtypes = importlib.import_module("ml_dtypes")
        except ImportError:
            raise UsageError(
                f"NumPy has no dtype {name}: pass a torch dtype, or `pip install ml_dtypes`"
            ) from None
        return np.dtype(getattr(ml_dtypes, _ML_NAMES.get(name, name)))
    try:
        return np.dtype(_NUMPY_NAMES.get(name, dtype) if name else dtype)
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"dtype is {shown(dtype)}, expected a NumPy or torch dtype, or a name such as 'f32'"
        ) from None


def dtype_name(dtype: np.dtype) -> str:
    """pycoll's name, such as "f32", else NumPy's name."""
    names = {numpy: name for name, numpy in (_NUMPY_NAMES | _ML_NAMES).items()}
    return names.get(dtype.name, dtype.name)


def _is_torch(dtype: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)
