"""Divide and conquer: ranks share out shards, a function maps them, an operation merges results.

Source: Dean & Ghemawat, MapReduce, OSDI 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.parallel.core import structures
from pycoll.parallel.core.mesh import world
from pycoll.parallel.core.placement import share
from pycoll.parallel.core.specs import replace

Merge = Callable[[Any, Any], Any]
_MERGE: dict[str, Merge] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "min": lambda a, b: torch.minimum(a, b) if isinstance(a, Tensor) else np.minimum(a, b),
    "max": lambda a, b: torch.maximum(a, b) if isinstance(a, Tensor) else np.maximum(a, b),
}
_ARRAYS = (Tensor, np.ndarray, np.generic, int, float, complex)


def map_reduce(
    fn: Callable[[Any], Any],
    shards: Sequence[Any],
    op: str | Merge = "sum",
    *,
    comm: Communicator | None = None,
    deterministic: bool = True,
) -> Any:
    """Merges `fn(shard)` of all shards by `op`; the ranks share out the shards. Collective.

    The result equals that of one process that maps and merges one shard after the other: bit for
    bit if `deterministic`, else up to the order of the additions.

    Args:
        fn: Returns an array, a tensor or a number, or tuples, lists and dicts of them, with the
            same shapes and dtypes for every shard. It must not change an earlier result.
        shards: The same on all ranks, at least one; each rank maps consecutive shards.
        op: "sum", "prod", "min" or "max"; or a function of two arrays, or of two tensors, that
            returns a new one of their shape and dtype. It is called for each array of the results,
            that of the earlier shards first, so it need not be commutative.
        comm: The ranks; None: those of `pycoll.init()`.
        deterministic: Merge in the order of the shards, from rank to rank.

    Returns:
        The merged result on every rank; numbers are NumPy scalars.

    Raises:
        UsageError: There are no shards, `op` is unknown, a function that is not `deterministic`, or
            changes shapes or dtypes, or `fn` returns an unsupported type.

    Cost: for results of N bytes, s shards and n ranks: (n-1)(alpha + beta N) + s gamma N and a
        broadcast if `deterministic`; else s/n gamma N and an all_reduce. With fewer shards than
        ranks, one more split and broadcast.
    """
    if isinstance(op, str) and op not in _MERGE:
        raise UsageError(f"map_reduce: op is {op!r}, expected one of {', '.join(_MERGE)}")
    if not isinstance(op, str) and not deterministic:
        raise UsageError(
            "map_reduce: a function as op merges in the order of the shards: deterministic=True"
        )
    if not len(shards):
        raise UsageError("map_reduce: there are no shards, expected at least one")
    comm = comm or world()
    start, stop = share(len(shards), comm.size, comm.rank)
    mapped = [_arrays(fn(shards[i])) for i in range(start, stop)]
    if len(shards) >= comm.size:
        return _merge(mapped, op, comm, deterministic)
    busy = comm.split(0 if mapped else -1)
    merged = None
    if busy is not None:
        with busy:
            merged = _merge(mapped, op, busy, deterministic)
    return _tell(merged, comm)


def _merge(mapped: list[Any], op: str | Merge, comm: Communicator, deterministic: bool) -> Any:
    """Merges the results of all ranks; each rank has at least one."""
    merge = _MERGE[op] if isinstance(op, str) else _of_same_shape(op)
    result, rest = mapped[0], mapped[1:]
    flat = _leaves(result)
    if deterministic and comm.rank > 0:
        before = [x.clone() if isinstance(x, Tensor) else x.copy() for x in flat]
        for x in before:
            comm.recv(x, comm.rank - 1)
        flat = [merge(a, b) for a, b in zip(before, flat, strict=True)]
    for other in rest:
        flat = [merge(a, b) for a, b in zip(flat, _leaves(other), strict=True)]
    # Results of `fn` are not modified. NumPy turns arrays without dimensions into scalars.
    flat = [x.clone() if isinstance(x, Tensor) else np.array(x) for x in flat]
    if deterministic and comm.rank < comm.size - 1:
        for x in flat:
            comm.send(x, comm.rank + 1)
    for x in flat:
        if deterministic:
            comm.broadcast(x, root=comm.size - 1)
        else:
            comm.all_reduce(x, op)
    values = iter(flat)
    return replace(result, (Tensor, np.ndarray), lambda _: next(values))


def _of_same_shape(op: Merge) -> Merge:
    """The user's merge, whose results the next rank receives into arrays like its own."""

    def merge(a: Any, b: Any) -> Any:
        made = op(a, b)
        if isinstance(b, np.ndarray):
            made = np.asarray(made)
        if type(made) is not type(b) or (made.shape, made.dtype) != (b.shape, b.dtype):
            raise UsageError(
                f"map_reduce: op made {getattr(made, 'dtype', type(made).__name__)} of shape "
                f"{tuple(getattr(made, 'shape', ()))}, expected {b.dtype} of {tuple(b.shape)} as "
                "its arguments"
            )
        return made

    return merge


def _arrays(value: Any) -> Any:
    """Returns the same structure with numbers as arrays."""

    def one(x: Any) -> Any:
        return x.contiguous() if isinstance(x, Tensor) else np.array(x, order="C")

    made = replace(value, _ARRAYS, one)
    if not _leaves(made):
        raise UsageError(
            f"map_reduce: the function gave a {type(value).__name__}, expected an array, a tensor, "
            "a number, or tuples, lists and dicts of them"
        )
    return made


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    replace(value, (Tensor, np.ndarray), found.append)
    return found


def _tell(value: Any, comm: Communicator) -> Any:
    """Broadcasts rank 0's value: its structure as JSON, then each array."""
    sent = None
    if comm.rank == 0:
        sent = np.frombuffer(structures.encode(value, _array_to_json), np.uint8).copy()
    size = np.array([0 if sent is None else sent.size])
    comm.broadcast(size)
    if sent is None:
        sent = np.empty(structures.check_length(int(size[0]), "rank 0"), np.uint8)
    comm.broadcast(sent)
    if comm.rank != 0:
        value = structures.decode(sent.tobytes(), _array_from_json, "rank 0")
    for array in _leaves(value):
        comm.broadcast(array)
    return value


def _array_to_json(value: Any) -> tuple[str, list[Any]] | None:
    if isinstance(value, Tensor):
        return "tensor", [list(value.shape), structures.dtype_name(value.dtype), value.device.type]
    if isinstance(value, np.ndarray):
        return "array", [list(value.shape), value.dtype.name]
    return None


def _array_from_json(kind: str, content: list[Any]) -> Any:
    """An array for rank 0's values."""
    if kind == "tensor":
        shape, dtype, device = content
        dtype = structures.dtype_of(dtype)
        kind = structures.device_of(device)
        return torch.empty(structures.shape_of(shape), dtype=dtype, device=kind)
    if kind != "array":
        raise ValueError(f"unknown kind {kind!r}")
    shape, dtype = content
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return np.empty(structures.shape_of(shape), dtype)


__all__ = ["map_reduce"]
