"""The result that every collective must give each rank, from MPI's definitions; NumPy alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.bench.arithmetic import reduced

# One block of a rank's result: the ranks that contribute to it, and which block of their input.
Part = tuple[Sequence[int], int]
Parts = Callable[[int, int, int], list[Part] | None]
# By number of ranks.
_per_rank = lambda n: n  # noqa: E731
_others = lambda n: (n - 1) / n  # noqa: E731


@dataclass(frozen=True)
class Collective:
    """A row of the table of collectives.

    Attributes:
        name: Its name.
        parts: (ranks, rank, root) to the blocks of this rank's result; None: it has no result.
        has_op, has_root: Whether it takes these arguments.
        in_place: Whether the result lies in the input when there is no `out`.
        in_blocks, out_blocks: Blocks of a rank's input and output, by number of ranks.
        own_blocks: Whether the input blocks of different ranks are different blocks of the message.
        busbw_factor: Bus bandwidth over bytes per second, by number of ranks, as in nccl-tests.
    """

    name: str
    parts: Parts
    has_op: bool = False
    has_root: bool = False
    in_place: bool = False
    in_blocks: Callable[[int], int] = lambda n: 1
    out_blocks: Callable[[int], int] = lambda n: 1
    own_blocks: bool = False
    busbw_factor: Callable[[int], float] = lambda n: 1.0

    def blocks_per_payload(self, n: int) -> int:
        """Blocks of the larger one of input and output, whose bytes are a message's size."""
        return max(self.in_blocks(n), self.out_blocks(n))

    def leading(self, n: int, rows: int) -> tuple[int, ...]:
        """Shape of an input on n ranks for blocks of so many rows, before the row's own axes."""
        if self.name == "neighbor_exchange":
            return (2, rows)
        return (self.in_blocks(n) * rows,)

    def expected(self, values: np.ndarray, rank: int, root: int, op: str) -> np.ndarray | None:
        """This rank's result, from values of shape (n, *x.shape); None: there is none."""
        parts = self.parts(len(values), rank, root)
        if parts is None:
            return None
        return np.concatenate([self._block(values, part, op) for part in parts])

    def _block(self, values: np.ndarray, part: Part, op: str) -> np.ndarray:
        sources, block = part
        size = values.shape[1] // self.in_blocks(len(values))
        taken = values[list(sources), block * size : (block + 1) * size]
        return reduced(taken, op) if self.has_op else taken[0]

    def arguments(self, root: int, op: str = "sum") -> dict[str, Any]:
        """The arguments that only some collectives have."""
        given: dict[str, Any] = {"root": root} if self.has_root else {}
        return given | ({"op": op} if self.has_op else {})


def _row(name: str, parts: Parts, flags: str = "", **more: Any) -> Collective:
    more |= dict.fromkeys(flags.split(), True)
    return Collective(name, parts, **more)


# fmt: off
_IN_PARTS = {"in_blocks": _per_rank, "busbw_factor": _others}
_OUT_PARTS = {"out_blocks": _per_rank, "busbw_factor": _others}
_ROWS = (
    _row("all_reduce", lambda n, rank, root: [(range(n), 0)], "has_op in_place",
         busbw_factor=lambda n: 2 * _others(n)),
    _row("broadcast", lambda n, rank, root: [([root], 0)], "has_root in_place"),
    _row("reduce_scatter", lambda n, rank, root: [(range(n), rank)], "has_op", **_IN_PARTS),
    _row("all_gather", lambda n, rank, root: [([source], 0) for source in range(n)],
         "own_blocks", **_OUT_PARTS),
    _row("reduce", lambda n, rank, root: [(range(n), 0)] if rank == root else None,
         "has_op has_root in_place"),
    _row("gather", lambda n, rank, root: [([s], 0) for s in range(n)] if rank == root else None,
         "has_root own_blocks", **_OUT_PARTS),
    _row("scatter", lambda n, rank, root: [([root], rank)], "has_root", **_IN_PARTS),
    _row("all_to_all", lambda n, rank, root: [([source], rank) for source in range(n)],
         "own_blocks", out_blocks=_per_rank, **_IN_PARTS),
    _row("scan", lambda n, rank, root: [(range(rank + 1), 0)], "has_op in_place"),
    _row("exscan", lambda n, rank, root: [(range(rank), 0)] if rank > 0 else None,
         "has_op in_place"),
    _row("neighbor_exchange",
         lambda n, rank, root: [([(rank - 1) % n], 1), ([(rank + 1) % n], 0)],
         "own_blocks", in_blocks=lambda n: 2, out_blocks=lambda n: 2),
)
# fmt: on
COLLECTIVES = {row.name: row for row in _ROWS}
BARRIER = _row("barrier", lambda n, rank, root: None, busbw_factor=lambda n: 0.0)


def is_reduced_alike(name: str) -> bool:
    """Whether several ranks get the same reduction, which must then be the same bits."""
    return name == "all_reduce"


def roots_of(name: str, n: int) -> list[int]:
    """Roots to test on n ranks: the first, a middle and the last one."""
    return sorted({0, n // 2, n - 1}) if COLLECTIVES[name].has_root else [0]


def arguments(name: str, root: int, op: str = "sum") -> dict[str, Any]:
    return COLLECTIVES[name].arguments(root, op)


def run(comm: Any, name: str, x: Any, **options: Any) -> Any:
    return getattr(comm, name)(x, **options)


@functools.cache
def sources_by_block(name: str, n: int, rank: int, root: int) -> dict[int, Sequence[int]]:
    """The definition of a rank's result in blocks of the message, numbered over all inputs.

    Returns:
        By block: the ranks whose values of it are reduced to this rank's result. Other blocks are
        no part of the result.
    """
    row = COLLECTIVES["all_reduce" if name == "barrier" else name]
    return {
        (sources[0] * row.in_blocks(n) if row.own_blocks else 0) + taken: sources
        for sources, taken in row.parts(n, rank, root) or []
    }


def blocks_of_inputs(name: str, n: int) -> int:
    """Number of the blocks that `sources_by_block` counts."""
    row = COLLECTIVES["all_reduce" if name == "barrier" else name]
    return row.in_blocks(n) * (n if row.own_blocks else 1)
