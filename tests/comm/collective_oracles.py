"""What every collective must give, in NumPy: shapes of the inputs, and each rank's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from comm_cases import reduced

import pycoll
from pycoll import _core

INFO = {row.name: row for row in _core.collectives()}


@dataclass(frozen=True)
class Oracle:
    """A collective on values of shape (n, *x.shape), one x for each rank."""

    # Shape of x on n ranks for blocks of so many rows, before the row's own axes.
    leading: Callable[[int, int], tuple[int, ...]]
    # What (values, rank, root, op) gives; None: nothing that anybody may look at.
    expected: Callable[[np.ndarray, int, int, str], np.ndarray | None]
    in_place: bool = False  # the result lies in x where there is no out


def blocks(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(n, x.shape[0] // n, *x.shape[1:])


def flat(values: np.ndarray) -> np.ndarray:
    """The ranks' arrays, one behind the other along the first axis."""
    return values.reshape(-1, *values.shape[2:])


def one_block(n: int, rows: int) -> tuple[int, ...]:
    return (rows,)


def block_per_rank(n: int, rows: int) -> tuple[int, ...]:
    return (n * rows,)


ORACLES: dict[str, Oracle] = {
    "all_reduce": Oracle(one_block, lambda v, rank, root, op: reduced(v, op), in_place=True),
    "broadcast": Oracle(one_block, lambda v, rank, root, op: v[root], in_place=True),
    "reduce_scatter": Oracle(
        block_per_rank, lambda v, rank, root, op: blocks(reduced(v, op), len(v))[rank]
    ),
    "all_gather": Oracle(one_block, lambda v, rank, root, op: flat(v)),
    "reduce": Oracle(
        one_block,
        lambda v, rank, root, op: reduced(v, op) if rank == root else None,
        in_place=True,
    ),
    "gather": Oracle(one_block, lambda v, rank, root, op: flat(v) if rank == root else None),
    "scatter": Oracle(block_per_rank, lambda v, rank, root, op: blocks(v[root], len(v))[rank]),
    "all_to_all": Oracle(
        block_per_rank,
        lambda v, rank, root, op: flat(np.stack([blocks(x, len(v))[rank] for x in v])),
    ),
    "scan": Oracle(one_block, lambda v, rank, root, op: reduced(v[: rank + 1], op), in_place=True),
    "exscan": Oracle(
        one_block,
        lambda v, rank, root, op: reduced(v[:rank], op) if rank > 0 else None,
        in_place=True,
    ),
    "neighbor_exchange": Oracle(
        lambda n, rows: (2, rows),
        lambda v, rank, root, op: np.stack([v[rank - 1][1], v[(rank + 1) % len(v)][0]]),
    ),
}


def roots_of(name: str, n: int) -> list[int]:
    return sorted({0, n // 2, n - 1}) if INFO[name].has_root else [0]


def arguments(name: str, root: int, op: str = "sum") -> dict[str, Any]:
    """The arguments that only some collectives have."""
    given: dict[str, Any] = {}
    if INFO[name].has_root:
        given["root"] = root
    if INFO[name].has_op:
        given["op"] = op
    return given


def is_reduced_alike(name: str) -> bool:
    """Whether several ranks get the same reduction, which must then be the same bits."""
    return name == "all_reduce"


def run(comm: pycoll.Communicator, name: str, x: Any, **options: Any) -> Any:
    return getattr(comm, name)(x, **options)
