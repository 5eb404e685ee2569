"""Schedules: collectives as lists of moves, which can be proved, simulated, explained and drawn.

    >>> s = build("all_reduce", "ring", n=8)
    >>> s.verify(slots=2).slots
    2

An algorithm of your own is a generator of moves:

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycoll import _core
from pycoll.algorithm_info import AlgorithmInfo
from pycoll.errors import UsageError
from pycoll.move import Move, copy, reduce
from pycoll.proof import Proof, ScheduleError
from pycoll.simulation import Event, Simulation

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
    "copy",
    "info",
    "reduce",
    "register",
]

Cost = float | Sequence[Sequence[float]] | Callable[[int, int], float]
Generator = Callable[[int, int], Iterable[Move]]

_MOST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class _Registered:
    row: AlgorithmInfo
    generate: Generator
    num_chunks: int | Callable[[int], int]


_registered: dict[tuple[str, str], _Registered] = {}


class Schedule:
    """All moves of the whole world for one collective. Made by build()."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @property
    def core(self) -> Any:
        """The underlying _core.Schedule, which the executor runs."""
        return self._core

    @property
    def collective(self) -> str:
        return self._core.collective

    @property
    def algorithm(self) -> str:
        return self._core.algorithm

    @property
    def n(self) -> int:
        """Number of ranks."""
        return self._core.n

    @property
    def num_chunks(self) -> int:
        """Chunks of all blocks together; chunk c is a piece of block c // (chunks of a block)."""
        return self._core.num_chunks

    @property
    def chunks_per_message(self) -> int:
        """Chunks that the size of a message counts: of what a rank brings, or gets if more."""
        return self._core.chunks_per_message

    @property
    def root(self) -> int:
        return self._core.root

    @functools.cached_property
    def moves(self) -> tuple[Move, ...]:
        """By ascending round."""
        return tuple(
            Move(round, kind, (first, count), src, dst)
            for round, kind, first, count, src, dst in self._core.moves
        )

    @property
    def num_steps(self) -> int:
        """Steps of the longest program of a rank."""
        return max(len(program.steps) for program in self.programs())

    def starts_with_value(self, rank: int, chunk: int) -> bool:
        """Whether the rank has a value in that chunk before the first round."""
        return self._core.starts_with_value(rank, chunk)

    def goal(self, rank: int, chunk: int) -> tuple[str, int]:
        """What the rank must hold in that chunk at the end.

        Returns:
            `any` (nobody will look), `start` with the rank whose start value it is, `reduced` (of
            all ranks), `prefix` (of ranks up to this one) or `prefix_before` (of those below it).
        """
        return self._core.goal(rank, chunk)

    def programs(
        self, *, fuse: bool = True, multicast: bool = True, join_blocks: bool = True
    ) -> list[Any]:
        """Lowers the moves to what each rank executes.

        Args:
            fuse: join a receive with the send that passes its result on.
            multicast: links exist in which one slot has many readers.
            join_blocks: a message may hold chunks of several blocks.

        Returns:
            One program per rank, with .rank, .peers and .steps; a step has .src_peers and
            .dst_peers (ranks), .first_chunk, .num_chunks, .round, .read_local, .write_local,
            .final, .multicast_src and .multicast_dst.

        Raises:
            UsageError: a rank would have more than 64 peers.

        Cost: proportional to the moves; the square of a rank's steps with `fuse`.
        """
        return self._core.programs(fuse, multicast, join_blocks)

    lower = programs

    def verify(
        self,
        slots: int = 8,
        *,
        fuse: bool = True,
        multicast: bool = True,
        join_blocks: bool = True,
    ) -> Proof:
        """Executes the lowered programs on symbolic values, under a real number of slots.

        Args:
            slots: messages that a link holds until they are read.
            fuse: as in programs().
            multicast: as in programs().
            join_blocks: as in programs().

        Returns:
            The proof.

        Raises:
            ScheduleError: it fails, saying what happens and where.

        Cost: steps times ranks times chunks; milliseconds for 16 ranks.
        """
        programs = self.programs(fuse=fuse, multicast=multicast, join_blocks=join_blocks)
        proof = _core.verify_programs(self._core, programs, slots)
        if not proof.ok:
            raise ScheduleError(proof.error)
        return Proof(slots, max(len(program.steps) for program in programs), proof.order)

    def min_slots(
        self,
        max_slots: int = _MOST_SLOTS,
        *,
        fuse: bool = True,
        multicast: bool = True,
        join_blocks: bool = True,
    ) -> int:
        """The smallest number of slots for which the proof holds.

        Args:
            max_slots: give up beyond it.
            fuse: as in programs().
            multicast: as in programs().
            join_blocks: as in programs().

        Returns:
            A number of slots, at least 1.

        Raises:
            ScheduleError: max_slots is not enough, or the schedule is wrong.

        Cost: that of verify(), once per slot count up to the result and once for max_slots.
        """
        programs = self.programs(fuse=fuse, multicast=multicast, join_blocks=join_blocks)
        slots, error = _core.min_safe_slots(self._core, programs, max_slots)
        if slots == 0:
            raise ScheduleError(error)
        return slots

    def simulate(
        self,
        nbytes: int,
        alpha: Cost,
        beta: Cost,
        gamma: Cost = 0.0,
        *,
        slots: int = 8,
        tile_bytes: int | None = None,
    ) -> Simulation:
        """Plays the programs through in time, on links that cost what you say.

        A message of b bytes takes alpha + b beta, and holds the sender's sending port and the
        receiver's receiving port. Combining takes gamma per byte of each further source.

        Args:
            nbytes: size of the message: the larger one of what a rank brings and what it gets.
            alpha: latency, seconds: one number, n x n numbers [src][dst], or f(src, dst).
            beta: inverse bandwidth, seconds per byte, likewise.
            gamma: inverse rate of reduction at dst, seconds per byte, likewise.
            slots: messages that a link holds until they are read.
            tile_bytes: the message, or each of its blocks, is cut into tiles of this size; None is
                one tile.

        Returns:
            Times, bytes sent and all events.

        Raises:
            UsageError: a size is negative, or the ranks deadlock with so few slots.

        Cost: about a microsecond per transfer.
        Source: the model of R. Hockney, "The communication challenge for MPP", 1994.
        """
        core = _core.simulate_programs(
            self.programs(),
            nbytes,
            tile_bytes or 0,
            slots,
            self._matrix(alpha),
            self._matrix(beta),
            self._matrix(gamma),
        )
        events = tuple(
            Event(e.kind, e.rank, e.peer, e.step, e.tile, e.chunks, e.nbytes, e.start_s, e.end_s)
            for e in core.events
        )
        return Simulation(core.time_s, tuple(core.rank_time_s), tuple(core.sent_bytes), events)

    def explain(self, *, fuse: bool = True, multicast: bool = True) -> str:
        """The programs of all ranks as text, a line per step."""
        return _core.explain_programs(self._core, self.programs(fuse=fuse, multicast=multicast))

    def draw(self, path: str | Path | None = None, **options: Any) -> Any:
        """Draws a space-time diagram; see pycoll.draw.draw_schedule."""
        from pycoll.draw import draw_schedule

        return draw_schedule(self, path, **options)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.collective} {self.algorithm}: {self.n} ranks, "
            f"{self.num_chunks} chunks, {len(self._core.moves)} moves>"
        )

    def _matrix(self, cost: Cost) -> list[float]:
        ranks = range(self.n)
        if callable(cost):
            return [float(cost(src, dst)) if src != dst else 0.0 for src in ranks for dst in ranks]
        if isinstance(cost, (int, float)):
            return [float(cost)] * self.n**2
        return [float(value) for row in cost for value in row]


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
        name: of the algorithm. Registering a name again replaces it; built-in names are taken.
        num_chunks: of all blocks together, a multiple of their number: a number, or a function of
            n. Blocks are numbered as in csrc/schedule/collectives.h: all_gather has n, all_to_all
            n * n (block s * n + d goes from s to d), all_reduce one.
        cost: time of n ranks and N bytes in alpha, beta, gamma.
        source: where the algorithm was published.

    Returns:
        A decorator for a function fn(n, root) that yields moves. It is proved for every n for
        which it is built, before it can run.

    Raises:
        UsageError: there is no such collective, or the name is a built-in algorithm's.
    """
    if name in (row.name for row in _builtin(collective)):
        raise UsageError(f"{collective} has a built-in algorithm called {name!r}: choose another")

    def decorate(generate: Generator) -> Generator:
        row = AlgorithmInfo(collective, name, cost, source, None)
        _registered[collective, name] = _Registered(row, generate, num_chunks)
        return generate

    return decorate


def build(collective: str, algorithm: str, n: int, root: int = 0) -> Schedule:
    """Builds the schedule of a built-in or registered algorithm.

    Args:
        collective: such as `all_reduce`.
        algorithm: a name from algorithms(collective).
        n: number of ranks.
        root: rank whose value counts, for collectives that have one.

    Returns:
        The schedule. A registered algorithm has been proved for this n.

    Raises:
        UsageError: no such collective or algorithm, or a move that has no meaning.
        ScheduleError: a registered algorithm does not reach the collective's goal.

    Cost: proportional to the moves; for a registered algorithm also that of min_slots().
    """
    own = _registered.get((collective, algorithm))
    if own is None:
        info(collective, algorithm)  # its error names the registered algorithms, too
        return Schedule(_core.build_schedule(collective, algorithm, n, root))
    num_chunks = own.num_chunks(n) if callable(own.num_chunks) else own.num_chunks
    moves = [(m.round, m.kind, *m.chunks, m.src, m.dst) for m in own.generate(n, root)]
    schedule = Schedule(
        _core.schedule_from_moves(collective, algorithm, n, num_chunks, root, moves)
    )
    schedule.min_slots()
    return schedule


def algorithms(collective: str = "all_reduce") -> list[str]:
    """Names of the collective's algorithms, built-in ones first.

    Raises:
        UsageError: there is no such collective.
    """
    own = [name for (of, name) in _registered if of == collective]
    return [row.name for row in _builtin(collective)] + own


def info(collective: str, algorithm: str) -> AlgorithmInfo:
    """The algorithm's row: its cost, its source and what its ranks send.

    Raises:
        UsageError: no such collective or algorithm.
    """
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


def _builtin(collective: str) -> list[Any]:
    known = [row.name for row in _core.collectives()]
    if collective not in known:
        raise UsageError(
            f"no collective is called {collective!r}: expected one of {', '.join(known)}"
        )
    return [row for row in _core.algorithms() if row.collective == collective]
