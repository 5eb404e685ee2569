"""Schedules: collectives as lists of moves, which can be proved, simulated, explained and drawn.

    >>> s = build("all_reduce", "ring", n=8)
    >>> s.verify(slots=2).slots
    2

Your own algorithm is a generator of moves:

    >>> @register("all_reduce", "mine", num_chunks=1)
    ... def mine(n, root):
    ...     for rank in range(1, n):
    ...         yield reduce(0, 0, src=rank, dst=0)
    ...         yield copy(1, 0, src=0, dst=rank)
    >>> build("all_reduce", "mine", n=4).min_slots()
    1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pycoll import _core
from pycoll.arguments import flag, short_name, shown, whole_number
from pycoll.errors import UsageError
from pycoll.schedule import levels as _levels
from pycoll.schedule.algorithm_info import AlgorithmInfo
from pycoll.schedule.move import Move, copy, reduce
from pycoll.schedule.proof import Proof, ScheduleError
from pycoll.schedule.schedule_object import Schedule
from pycoll.schedule.simulation import Event, Simulation

__all__ = [
    "AlgorithmInfo",
    "Event",
    "Move",
    "Proof",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "algorithms",
    "build",
    "build_hierarchical",
    "copy",
    "info",
    "reduce",
    "register",
    "register_levels",
]

Generator = Callable[[int, int], Iterable[Move]]
MAX_RANKS = 4096  # of a schedule whose moves are listed; topologies simulate more
_MAX_CHUNKS = 1 << 24
_INT32 = (-(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class _Registered:
    row: AlgorithmInfo
    generate: Generator
    num_chunks: int | Callable[[int], int]


_registered: dict[tuple[str, str], _Registered] = {}


def register(
    collective: str,
    name: str,
    *,
    num_chunks: int | Callable[[int], int] = 1,
    cost: str = "",
    source: str = "",
) -> Callable[[Generator], Generator]:
    """Makes a generator of moves an algorithm, usable as `algorithm=name` everywhere.

    Args:
        collective: such as `all_reduce`.
        name: name of the algorithm. Registering a name again replaces the algorithm; built-in
            names are reserved.
        num_chunks: number of chunks in all blocks, a multiple of the number of blocks; or a
            function of n. Blocks are numbered as in csrc/schedule/collectives.h: all_gather has n,
            all_to_all n * n (block s * n + d goes from s to d), all_reduce one.
        cost: time for n ranks and N bytes in alpha, beta, gamma.
        source: publication of the algorithm.

    Returns:
        A decorator for a function fn(n, root) that yields moves. The schedule for each n is proved
        before it can run.

    Raises:
        UsageError: there is no such collective, or the name is a built-in algorithm's.
    """
    name = short_name(name, "name")
    if name in (row.name for row in _builtin(collective)):
        raise UsageError(f"{collective} has a built-in algorithm called {name!r}: choose another")

    def decorate(generate: Generator) -> Generator:
        row = AlgorithmInfo(collective, name, cost, source, None)
        _registered[collective, name] = _Registered(row, generate, num_chunks)
        return generate

    return decorate


def register_levels(name: str, sizes: Sequence[int], *, split: bool = True) -> list[str]:
    """Makes schedules for domains inside domains algorithms, usable as `algorithm=name`.

    Args:
        name: name of the algorithm, for all its collectives.
        sizes: members of a unit, for each level from the inside out: (8, 8, 2) is 8 ranks to an L3,
            8 L3s to a socket, 2 sockets; `topology.read_host().sizes` has those of a machine.
        split: each level reduces and gathers a part of the payload on each member, for large
            payloads. False: one member of each unit has it all, for small ones.

    Returns:
        The collectives: all_reduce, reduce and broadcast; with `split` also reduce_scatter and
        all_gather. reduce and broadcast are the same in both forms.

    Raises:
        UsageError: sizes is not a sequence of positive numbers, or the name is a built-in one's.

    Cost: none; building the schedule is proportional to its moves.
    Source: XHC (Katevenis et al., Cluster 2022) and Open MPI's coll/acoll for one member of each
        unit; BlueConnect (M. Cho et al., MLSys 2019) for parts; see pycoll/schedule/levels.py.
    """
    sizes = _levels.check_sizes(sizes)
    split = flag(split, "split")

    def add(collective: str) -> None:
        def generate(n: int, root: int) -> Iterable[Move]:
            if n != math.prod(sizes):
                raise UsageError(f"{name}: levels of {sizes} are {math.prod(sizes)} ranks, not {n}")
            return _levels.moves_of(collective, sizes, root, split)

        chunks = functools.partial(_levels.num_chunks_of, collective, split=split)
        register(collective, name, num_chunks=chunks, cost=_levels.COST, source=_levels.SOURCE)(
            generate
        )

    collectives = list(_levels.COLLECTIVES[split])
    for collective in collectives:
        add(collective)
    return collectives


def build(collective: str, algorithm: str, n: int, root: int = 0) -> Schedule:
    """Builds the schedule of a built-in or registered algorithm.

    Args:
        collective: such as `all_reduce`.
        algorithm: a name from algorithms(collective).
        n: number of ranks.
        root: root of a rooted collective.

    Returns:
        The schedule. A registered algorithm has been proved for this n.

    Raises:
        UsageError: the collective or the algorithm is unknown, or a move is invalid.
        ScheduleError: a registered algorithm does not reach the collective's goal.

    Cost: proportional to the moves; for a registered algorithm also that of min_slots().
    """
    collective, algorithm = short_name(collective, "collective"), short_name(algorithm, "algorithm")
    n = whole_number(n, "n", 1, MAX_RANKS)
    root = whole_number(root, "root", 0, n - 1)
    own = _registered.get((collective, algorithm))
    if own is None:
        info(collective, algorithm)  # raises an error that lists the registered algorithms, too
        return Schedule(_core.build_schedule(collective, algorithm, n, root))
    num_chunks = own.num_chunks(n) if callable(own.num_chunks) else own.num_chunks
    num_chunks = whole_number(num_chunks, "num_chunks", 1, _MAX_CHUNKS)
    moves = [_numbers(move) for move in own.generate(n, root)]
    schedule = Schedule(
        _core.schedule_from_moves(collective, algorithm, n, num_chunks, root, moves)
    )
    schedule.min_slots()
    return schedule


def build_hierarchical(collective: str, n: int, ranks_per_host: int, root: int = 0) -> Schedule:
    """Builds a schedule for hosts of several ranks: rings inside the hosts and between them.

    Args:
        collective: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast or reduce.
        n: number of ranks.
        ranks_per_host: ranks of each host, in rank order; it divides n.
        root: root of broadcast and reduce.

    Returns:
        The schedule.

    Raises:
        UsageError: the collective is another one, or ranks_per_host does not divide n.

    Cost: proportional to the moves.
    Source: M. Cho et al., "BlueConnect", MLSys 2019; see csrc/algorithms/hierarchical.cc.
    """
    collective = short_name(collective, "collective")
    n = whole_number(n, "n", 1, MAX_RANKS)
    ranks_per_host = whole_number(ranks_per_host, "ranks_per_host", 1, n)
    root = whole_number(root, "root", 0, n - 1)
    return Schedule(_core.build_hierarchical(collective, n, ranks_per_host, root))


def algorithms(collective: str = "all_reduce") -> list[str]:
    """Returns the names of the collective's algorithms, built-in ones first.

    Raises:
        UsageError: there is no such collective.
    """
    builtin = [row.name for row in _builtin(collective)]
    return builtin + [name for (of, name) in _registered if of == collective]


def info(collective: str, algorithm: str) -> AlgorithmInfo:
    """Returns the algorithm's row: its cost, its source and the amount that its ranks send.

    Raises:
        UsageError: no such collective or algorithm.
    """
    collective, algorithm = short_name(collective, "collective"), short_name(algorithm, "algorithm")
    own = _registered.get((collective, algorithm))
    if own is not None:
        return own.row
    for row in _builtin(collective):
        if row.name == algorithm:
            return AlgorithmInfo(collective, row.name, row.cost, row.source, row.sent_fraction)
    raise UsageError(
        f"{collective} has no algorithm called {algorithm!r}: "
        f"expected one of {', '.join(algorithms(collective))}"
    )


def _numbers(move: Any) -> tuple[int, str, int, int, int, int]:
    """A move as the core takes it; raises UsageError if it is none."""
    if not isinstance(move, Move):
        raise UsageError(f"the generator yielded {shown(move)}, expected a Move")
    try:
        first, count = move.chunks
    except (TypeError, ValueError):
        raise UsageError(
            f"a move's chunks are {shown(move.chunks)}, expected (first, count)"
        ) from None

    def number(value: Any, name: str) -> int:
        return whole_number(value, f"a move's {name}", *_INT32)

    kind = short_name(move.kind, "a move's kind")
    chunks = number(first, "first chunk"), number(count, "chunks")
    return (
        number(move.round, "round"),
        kind,
        *chunks,
        number(move.src, "src"),
        number(move.dst, "dst"),
    )


def _builtin(collective: str) -> list[Any]:
    collective = short_name(collective, "collective")
    known = [row.name for row in _core.collectives()]
    if collective not in known:
        raise UsageError(
            f"no collective is called {collective!r}: expected one of {', '.join(known)}"
        )
    return [row for row in _core.algorithms() if row.collective == collective]
