"""Schedules for domains inside domains, such as L3, NUMA node and socket: any number of levels.

A rank's number has a digit for each level: digit l is its place among the members of its unit of
level l. Ranks that differ in digit l alone exchange at level l.

Cost of all_reduce for sizes s_0, s_1, ... with L levels and n ranks: 2L rounds, and a rank has
sum(s_l - 1) peers in place of n - 1. Split: at level l a rank sends 2 (s_l - 1)/(s_0 ... s_l)
of the payload, 2(n-1)/n in all. Not split: one rank of a unit reads the whole payload of s_l - 1
members and writes it to them, which suits payloads so small that latency decides. In both forms the
units of the outermost level send each other the fewest bytes: 2(s-1) payloads in all if there are
s. reduce_scatter and all_gather take a round for each chunk of the part that a rank sends.
Sources: G. Katevenis, M. Ploumidis, M. Marazakis, "A framework for hierarchical single-copy MPI
collectives on multicore nodes" (XHC), Cluster 2022; M. Cho et al., "BlueConnect: decomposing
all-reduce", MLSys 2019; coll/acoll of Open MPI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence

from pycoll.arguments import shown
from pycoll.errors import UsageError
from pycoll.schedule.move import Move, copy, reduce

__all__ = ["COLLECTIVES", "COST", "SOURCE", "check_sizes", "moves_of", "num_chunks_of"]

Moves = Iterator[Move]
COST = "a round for each level, sum(s_l - 1) peers; twice that for all_reduce"
SOURCE = "Katevenis et al. 2022; Cho et al. 2019"


class Levels:
    """Ranks by their digits."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.n = math.prod(self.sizes)
        self.strides = [math.prod(self.sizes[:level]) for level in range(len(self.sizes))]

    def digit(self, rank: int, level: int) -> int:
        return rank // self.strides[level] % self.sizes[level]

    def peers(self, rank: int, level: int) -> list[int]:
        """The other ranks that differ from `rank` in this digit alone, in rank order."""
        stride = self.strides[level]
        first = rank - self.digit(rank, level) * stride
        unit = (first + i * stride for i in range(self.sizes[level]))
        return [peer for peer in unit if peer != rank]

    def agrees(self, rank: int, other: int, below: int) -> bool:
        """Whether the digits of the levels under `below` are equal."""
        return (rank - other) % math.prod(self.sizes[:below]) == 0

    def pieces(self, rank: int, level: int, blocks: bool) -> list[tuple[int, int]]:
        """Chunks that are the rank's when the levels up to `level` have been split.

        With `blocks`, chunk r is rank r's, so they are apart. Otherwise the first digit counts most
        and they are one range.
        """
        inner = math.prod(self.sizes[: level + 1])
        if blocks:
            return [(chunk, 1) for chunk in range(rank % inner, self.n, inner)]
        first, count = 0, self.n
        for at in range(level + 1):
            count //= self.sizes[at]
            first += self.digit(rank, at) * count
        return [(first, count)]


def num_chunks_of(collective: str, n: int, split: bool) -> int:
    """Number of chunks of the collective's blocks together."""
    return n if split and collective not in ("broadcast", "reduce") else 1


def moves_of(collective: str, sizes: Sequence[int], root: int, split: bool) -> Moves:
    """The moves of one collective; COLLECTIVES has those of each form."""
    return COLLECTIVES[split][collective](Levels(sizes), root)


def _all_reduce_split(levels: Levels, root: int) -> Moves:
    start = yield from _scatter(levels, 0, blocks=False)
    yield from _gather(levels, start, blocks=False)


def _reduce_scatter(levels: Levels, root: int) -> Moves:
    yield from _scatter(levels, 0, blocks=True)


def _all_gather(levels: Levels, root: int) -> Moves:
    yield from _gather(levels, 0, blocks=True)


def _all_reduce_leaders(levels: Levels, root: int) -> Moves:
    yield from _to_root(levels, 0)
    yield from _from_root(levels, 0, start=len(levels.sizes))


def _reduce(levels: Levels, root: int) -> Moves:
    yield from _to_root(levels, root)


def _broadcast(levels: Levels, root: int) -> Moves:
    yield from _from_root(levels, root, start=0)


def _scatter(levels: Levels, start: int, blocks: bool) -> Generator[Move, None, int]:
    """Each level from the inside out: a rank sends each peer the peer's part of what it has.

    Chunks that are apart take a round each: in one round each would need a slot.
    """
    for level in range(len(levels.sizes)):
        count = len(levels.pieces(0, level, blocks))
        for rank in range(levels.n):
            for peer in levels.peers(rank, level):
                for i, chunks in enumerate(levels.pieces(peer, level, blocks)):
                    yield reduce(start + i, chunks, rank, peer)
        start += count
    return start


def _gather(levels: Levels, start: int, blocks: bool) -> Generator[Move, None, int]:
    """Each level from the outside in: a rank sends all peers what it has."""
    for level in reversed(range(len(levels.sizes))):
        count = len(levels.pieces(0, level, blocks))
        for rank in range(levels.n):
            for i, chunks in enumerate(levels.pieces(rank, level, blocks)):
                for peer in levels.peers(rank, level):
                    yield copy(start + i, chunks, rank, peer)
        start += count
    return start


def _to_root(levels: Levels, root: int) -> Moves:
    """Each level from the inside out: the members reduce into the one with the root's digit."""
    for level in range(len(levels.sizes)):
        for rank in range(levels.n):
            if levels.agrees(rank, root, level + 1):
                for peer in levels.peers(rank, level):
                    yield reduce(level, 0, peer, rank)


def _from_root(levels: Levels, root: int, start: int) -> Moves:
    """Each level from the outside in: the member with the root's digit copies to the others."""
    num_levels = len(levels.sizes)
    for level in reversed(range(num_levels)):
        for rank in range(levels.n):
            if levels.agrees(rank, root, level + 1):
                for peer in levels.peers(rank, level):
                    yield copy(start + num_levels - 1 - level, 0, rank, peer)


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes as a tuple; raises UsageError if they make no levels."""
    try:
        checked = tuple(sizes)
    except TypeError:
        checked = ()
    if not checked or not all(type(size) is int and size >= 1 for size in checked):
        raise UsageError(
            "sizes: expected members of a unit for each level, such as (8, 8, 2), "
            f"got {shown(sizes)}"
        )
    return checked


Make = Callable[[Levels, int], Moves]
COLLECTIVES: dict[bool, dict[str, Make]] = {
    True: {
        "all_reduce": _all_reduce_split,
        "reduce_scatter": _reduce_scatter,
        "all_gather": _all_gather,
        "reduce": _reduce,
        "broadcast": _broadcast,
    },
    False: {
        "all_reduce": _all_reduce_leaders,
        "reduce": _reduce,
        "broadcast": _broadcast,
    },
}
