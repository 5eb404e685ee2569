"""Values that travel between ranks: their structure as JSON, then each array or tensor.

A value has None, bools, numbers, text, arrays and tensors, and tuples, lists and dicts of them. The
receiver need not know its structure or its shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.parallel.core import structures
from pycoll.parallel.core.specs import replace

_PLAIN = (type(None), bool, int, float, str, np.generic, np.ndarray, Tensor)


def send(value: Any, peer: int, comm: Communicator) -> None:
    """Sends a value to a rank that calls `recv`."""
    text = _encoded(value)
    comm.send(np.array([text.size]), peer)
    comm.send(text, peer)
    for array in arrays_in(value):
        comm.send(_contiguous(array), peer)


def recv(peer: int, comm: Communicator) -> Any:
    """Receives the value that a rank sends."""
    size = comm.recv(np.zeros(1, np.int64), peer)
    text = np.empty(structures.check_length(int(size[0]), f"rank {peer}"), np.uint8)
    value = _decoded(comm.recv(text, peer), peer)
    for array in arrays_in(value):
        comm.recv(array, peer)
    return value


def broadcast(value: Any, root: int, comm: Communicator) -> Any:
    """Returns the value of rank `root` on every rank. Collective; other ranks' values are ignored.

    Cost: two small broadcasts, and one for each array.
    """
    if comm.size == 1:
        return value
    text = _encoded(value) if comm.rank == root else np.empty(0, np.uint8)
    size = comm.broadcast(np.array([text.size]), root)
    if comm.rank != root:
        text = np.empty(structures.check_length(int(size[0]), f"rank {root}"), np.uint8)
    comm.broadcast(text, root)
    if comm.rank != root:
        value = _decoded(text, root)
    for array in arrays_in(value):
        comm.broadcast(_contiguous(array) if comm.rank == root else array, root)
    return value


def arrays_in(value: Any) -> list[Any]:
    """The arrays and tensors of a value, in the order of its structure."""
    found: list[Any] = []
    replace(value, (Tensor, np.ndarray), found.append)
    return found


def check(value: Any, where: str) -> Any:
    """Returns a value that can be sent. Raises UsageError, which begins with `where`, for others.

    Subclasses of dict and list, such as Counter, are refused: they would arrive as dict and list.
    """
    if type(value) is dict:
        parts = [*value.keys(), *value.values()]
    elif type(value) is list or isinstance(value, tuple):
        parts = list(value)
    elif isinstance(value, _PLAIN):
        return value
    else:
        raise UsageError(
            f"{where} a {type(value).__name__}, expected arrays, tensors, numbers, text, None, or "
            "tuples, lists and dicts of them"
        )
    for part in parts:
        check(part, where)
    return value


def _encoded(value: Any) -> np.ndarray:
    return np.frombuffer(structures.encode(value, _leaf_to_json), np.uint8).copy()


def _decoded(text: np.ndarray, sender: int) -> Any:
    return structures.decode(text.tobytes(), _leaf_from_json, f"rank {sender}")


def _contiguous(array: Any) -> Any:
    return array.contiguous() if isinstance(array, Tensor) else np.asarray(array, order="C")


def _leaf_to_json(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, Tensor):
        return "tensor", [list(value.shape), structures.dtype_name(value.dtype), value.device.type]
    if isinstance(value, np.ndarray):
        return "array", [list(value.shape), value.dtype.name]
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return "number", [value.dtype.name, value.item()]
    return None


def _leaf_from_json(kind: str, content: list[Any]) -> Any:
    """A number, or an array or tensor to be filled."""
    if kind == "tensor":
        shape, dtype, device = content
        of_torch = structures.dtype_of(dtype)
        return torch.empty(
            structures.shape_of(shape), dtype=of_torch, device=structures.device_of(device)
        )
    if kind == "number":
        dtype, value = content
        return np.dtype(dtype).type(value)
    if kind != "array":
        raise ValueError(f"unknown kind {kind!r}")
    shape, dtype = content
    of_numpy = np.dtype(dtype)
    if of_numpy.hasobject:
        raise ValueError("an array of objects")
    return np.empty(structures.shape_of(shape), of_numpy)


__all__ = ["arrays_in", "broadcast", "check", "recv", "send"]
