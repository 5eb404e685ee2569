"""MapReduce: the ranks map shards, and an operation merges the results.

Source: Dean & Ghemawat, MapReduce, OSDI 2004.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.arguments import whole_number
from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.parallel.core import parcels
from pycoll.parallel.core.mesh import world
from pycoll.parallel.core.shards import map_shards
from pycoll.parallel.core.specs import replace

Merge = Callable[[Any, Any], Any]

_ELEMENTWISE: dict[str, Merge] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "min": lambda a, b: torch.minimum(a, b) if isinstance(a, Tensor) else np.minimum(a, b),
    "max": lambda a, b: torch.maximum(a, b) if isinstance(a, Tensor) else np.maximum(a, b),
}
_ARRAYS = (Tensor, np.ndarray, np.generic, int, float, complex)


def map_reduce(
    fn: Callable[[Any], Any] | None,
    shards: Sequence[Any],
    op: str | Merge = "sum",
    *,
    root: int | None = None,
    comm: Communicator | None = None,
    deterministic: bool = True,
    dynamic: bool = False,
) -> Any:
    """Merges `fn(shard)` of all shards by `op`; the ranks share out the shards. Collective.

    The result equals that of one process that maps and merges one shard after the other: bit for
    bit if `deterministic`, else up to the order of the merges.

    Args:
        fn: Maps a shard. None: the shards are tasks, functions without arguments, and are called.
            For the named ops it returns an array, a tensor or a number, or tuples, lists and dicts
            of them, with the same structure and dtypes for every shard; for a function also None
            and text, and any structure. It must not change an earlier result.
        shards: Identical on all ranks, at least one.
        op: "sum", "prod", "min" or "max" of each element, for results of equal shapes; "concat":
            arrays one after the other along their first axis, in the order of the shards; or a
            function `merge(a, b)` of two results, which is associative and, for
            `deterministic=False` with `dynamic`, commutative. It may change and return `a`.
        root: The only rank that gets the result. None: all ranks get it.
        comm: The ranks; None: those of `pycoll.init()`.
        deterministic: Merge in the order of the shards, from rank to rank.
        dynamic: A rank gets its next shard when it has mapped one, so that a slow rank maps fewer.
            Otherwise each rank maps an equal share of consecutive shards.

    Returns:
        The merged result, with numbers as NumPy scalars for the named ops; None on ranks other than
        `root`.

    Raises:
        UsageError: There are no shards, `op` or `root` is unknown, or `fn` returns an unsupported
            type.
        Exception: What `fn` raised on this rank.
        Error: `fn` raised on another rank; the message names shard and rank.

    Cost: for results of N bytes, s shards and n ranks: (n-1)(alpha + beta N) + s gamma N and a
        broadcast if `deterministic`, where n-1 becomes at most s-1 if `dynamic`; else s/n gamma N
        and an all_reduce, or for a function lg n (alpha + beta N + gamma N) and a broadcast.
        "concat": one broadcast of each rank's results. `root` saves the last broadcast. Before it,
        one small all_reduce, and for `dynamic` a split and two small messages for each shard. A
        rank keeps the results of its shards until all are mapped.
    """
    if not callable(op) and op not in (*_ELEMENTWISE, "concat"):
        names = ", ".join((*_ELEMENTWISE, "concat"))
        raise UsageError(f"map_reduce: op is {op!r}, expected one of {names}, or a function of two")
    if not len(shards):
        raise UsageError("map_reduce: there are no shards, expected at least one")
    if fn is None and (other := next((s for s in shards if not callable(s)), None)) is not None:
        raise UsageError(
            f"map_reduce: fn is None and a shard is a {type(other).__name__}, expected tasks: "
            "functions without arguments"
        )
    comm = comm or world()
    if root is not None:
        root = whole_number(root, "root", 0, comm.size - 1)

    def mapped_one(i: int) -> Any:
        value = shards[i]() if fn is None else fn(shards[i])
        return (
            parcels.check(value, "map_reduce: the function gave")
            if callable(op)
            else _arrays(value)
        )

    mapped, owners = map_shards(mapped_one, len(shards), comm, dynamic=dynamic)
    if op == "concat":
        return _scalars(_concatenated(mapped, owners, root, comm))
    merge = op if callable(op) else functools.partial(_merge_elements, _ELEMENTWISE[op])
    if deterministic:
        merged = _deliver(_in_order(mapped, owners, merge, comm), owners[-1], root, comm)
    elif callable(op) or len(set(owners)) < comm.size:
        merged = _deliver(_by_tree(mapped, owners, merge, comm), min(owners), root, comm)
    else:
        merged = _reduced(functools.reduce(merge, mapped.values()), op, root, comm)
    return merged if callable(op) else _scalars(merged)


def _in_order(mapped: dict[int, Any], owners: list[int], merge: Merge, comm: Communicator) -> Any:
    """Merges one shard after the other; returns the result on the last shard's rank."""
    merged = None
    for i, owner in enumerate(owners):
        before = owners[i - 1] if i else owner
        if comm.rank == before != owner:
            parcels.send(merged, owner, comm)
        if comm.rank == owner:
            if owner != before:
                merged = parcels.recv(before, comm)
            merged = merge(merged, mapped[i]) if i else mapped[i]
    return merged


def _by_tree(mapped: dict[int, Any], owners: list[int], merge: Merge, comm: Communicator) -> Any:
    """Merges the results of pairs of ranks, of pairs of pairs, and so on.

    Ranks without results take no part. Equal shares are merged in the order of the shards.

    Returns:
        The result on the first rank that has mapped a shard.
    """
    if not mapped:
        return None
    ranks = sorted(set(owners))
    place, distance = ranks.index(comm.rank), 1
    merged = functools.reduce(merge, mapped.values())
    while distance < len(ranks) and place % (2 * distance) == 0:
        if place + distance < len(ranks):
            merged = merge(merged, parcels.recv(ranks[place + distance], comm))
        distance *= 2
    if distance < len(ranks):
        parcels.send(merged, ranks[place - distance], comm)
    return merged


def _reduced(merged: Any, op: str, root: int | None, comm: Communicator) -> Any:
    """Reduces the arrays of the ranks' results, which have one structure."""

    def one(x: Any) -> Any:
        x = np.array(x) if isinstance(x, (np.ndarray, np.generic)) else x.clone()
        return comm.all_reduce(x, op) if root is None else comm.reduce(x, root, op)

    merged = replace(merged, (Tensor, np.ndarray, np.generic), one)
    return merged if root in (None, comm.rank) else None


def _concatenated(
    mapped: dict[int, Any], owners: list[int], root: int | None, comm: Communicator
) -> Any:
    """Joins the arrays of all results in the order of the shards."""
    mine = list(mapped.values())
    by_rank = {rank: iter(_deliver(mine, rank, root, comm) or ()) for rank in sorted(set(owners))}
    if root not in (None, comm.rank):
        return None
    results = [next(by_rank[owner]) for owner in owners]
    columns = iter(list(zip(*_checked_leaves(results), strict=True)))

    def joined(_: Any) -> Any:
        column = next(columns)
        if isinstance(column[0], Tensor):
            return torch.cat([torch.atleast_1d(x) for x in column])
        return np.concatenate([np.atleast_1d(x) for x in column])

    return replace(results[0], (Tensor, np.ndarray), joined)


def _deliver(value: Any, holder: int, root: int | None, comm: Communicator) -> Any:
    """Brings the value of rank `holder` to `root`, or to all ranks."""
    if root is None:
        return parcels.broadcast(value, holder, comm)
    if root != holder and comm.rank == holder:
        parcels.send(value, root, comm)
    if root != holder and comm.rank == root:
        return parcels.recv(holder, comm)
    return value if comm.rank == root else None


def _merge_elements(merge: Merge, a: Any, b: Any) -> Any:
    """Merges each array of one result with that of another."""
    leaves = iter(
        [
            np.asarray(merge(x, y)) if isinstance(x, np.ndarray) else merge(x, y)
            for x, y in zip(*_checked_leaves([a, b]), strict=True)
        ]
    )
    return replace(a, (Tensor, np.ndarray), lambda _: next(leaves))


def _checked_leaves(results: list[Any]) -> list[list[Any]]:
    leaves = [parcels.arrays_in(result) for result in results]
    for found in leaves:
        if len(found) != len(leaves[0]):
            raise UsageError(
                f"map_reduce: the function gave {len(leaves[0])} arrays for one shard and "
                f"{len(found)} for another, expected the same structure for all"
            )
    return leaves


def _arrays(value: Any) -> Any:
    """Returns a copy of the structure with numbers as arrays."""

    def one(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, Tensor) else np.array(x, order="C")

    made = replace(value, _ARRAYS, one)
    if not parcels.arrays_in(made):
        raise UsageError(
            f"map_reduce: the function gave a {type(value).__name__}, expected an array, a tensor, "
            "a number, or tuples, lists and dicts of them"
        )
    return made


def _scalars(value: Any) -> Any:
    """Returns the structure with arrays without dimensions as NumPy scalars."""
    return replace(value, np.ndarray, lambda x: x[()])


__all__ = ["map_reduce"]
