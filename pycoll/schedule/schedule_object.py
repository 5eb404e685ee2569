"""A schedule as an object: the moves of one collective and the operations on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from pycoll import _core
from pycoll.arguments import flag, shown, whole_number
from pycoll.errors import UsageError
from pycoll.schedule.move import Move
from pycoll.schedule.proof import Proof, ScheduleError
from pycoll.schedule.simulation import Event, Simulation

if TYPE_CHECKING:
    from pycoll.topology import NetworkSimulation, Topology

__all__ = ["Schedule"]

Cost = float | Sequence[Sequence[float]] | Callable[[int, int], float]

_MOST_SLOTS = 64  # that min_slots tries
_MAX_SLOTS = 4096
_MAX_BYTES = 1 << 62


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
        """Number of chunks in all blocks; chunk c is a part of block c // (chunks of a block)."""
        return self._core.num_chunks

    @property
    def chunks_per_message(self) -> int:
        """Number of chunks in a rank's input or output, whichever is larger."""
        return self._core.chunks_per_message

    @property
    def root(self) -> int:
        return self._core.root

    @functools.cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves, by ascending round."""
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
        return self._core.starts_with_value(*self._place(rank, chunk))

    def goal(self, rank: int, chunk: int) -> tuple[str, int]:
        """Value that the rank must hold in that chunk at the end.

        Returns:
            `any` (the value is not used), `start` with the rank whose start value it is, `reduced`
            (of all ranks), `prefix` (of ranks up to this one) or `prefix_before` (of lower ranks).
        """
        return self._core.goal(*self._place(rank, chunk))

    def programs(
        self,
        *,
        fuse: bool = True,
        multicast: bool = True,
        join_blocks: bool = True,
        join_chunks: bool = True,
        phases: bool = False,
    ) -> list[Any]:
        """Lowers the moves to the programs that the ranks execute.

        Args:
            fuse: join a receive with the send that forwards its result.
            multicast: links exist in which one slot has many readers.
            join_blocks: a message may hold chunks of several blocks.
            join_chunks: a message may hold several chunks.
            phases: steps are marked that a team of a device's threads runs at once.

        Returns:
            One program per rank, with .rank, .peers and .steps; a step has .src_peers and
            .dst_peers (ranks), .first_chunk, .num_chunks, .round, .read_local, .write_local,
            .final, .multicast_src, .multicast_dst and .same_phase (as the step before it).

        Raises:
            UsageError: a rank would have more than 64 peers.

        Cost: proportional to the moves; the square of a rank's steps with `fuse`.
        """
        named = {"fuse": fuse, "multicast": multicast}
        named |= {"join_blocks": join_blocks, "join_chunks": join_chunks, "phases": phases}
        return self._core.programs(*(flag(value, name) for name, value in named.items()))

    lower = programs

    def verify(
        self,
        slots: int = 8,
        *,
        fuse: bool = True,
        multicast: bool = True,
        join_blocks: bool = True,
        join_chunks: bool = True,
        phases: bool = False,
    ) -> Proof:
        """Executes the lowered programs on symbolic values, under a real number of slots.

        Args:
            slots: messages that a link holds until they are read.
            fuse: as in programs().
            multicast: as in programs().
            join_blocks: as in programs().
            join_chunks: as in programs().
            phases: as in programs().

        Returns:
            The proof.

        Raises:
            ScheduleError: the proof fails; the message says why and where.

        Cost: steps times ranks times chunks; milliseconds for 16 ranks.
        """
        slots = whole_number(slots, "slots", 1, _MAX_SLOTS)
        programs = self.programs(
            fuse=fuse,
            multicast=multicast,
            join_blocks=join_blocks,
            join_chunks=join_chunks,
            phases=phases,
        )
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
        join_chunks: bool = True,
        phases: bool = False,
    ) -> int:
        """The smallest number of slots for which the proof holds.

        Args:
            max_slots: largest number of slots to try.
            fuse: as in programs().
            multicast: as in programs().
            join_blocks: as in programs().
            join_chunks: as in programs().
            phases: as in programs().

        Returns:
            The number of slots, at least 1.

        Raises:
            ScheduleError: max_slots is not enough, or the schedule is wrong.

        Cost: that of verify(), once per slot count up to the result and once for max_slots.
        """
        max_slots = whole_number(max_slots, "max_slots", 1, _MAX_SLOTS)
        programs = self.programs(
            fuse=fuse,
            multicast=multicast,
            join_blocks=join_blocks,
            join_chunks=join_chunks,
            phases=phases,
        )
        slots, error = _core.min_safe_slots(self._core, programs, max_slots)
        if slots == 0:
            raise ScheduleError(error)
        return slots

    @overload
    def simulate(
        self,
        nbytes: int,
        alpha: Cost,
        beta: Cost,
        gamma: Cost = 0.0,
        *,
        slots: int = 8,
        tile_bytes: int | None = None,
        topology: None = None,
    ) -> Simulation: ...

    @overload
    def simulate(
        self,
        nbytes: int,
        *,
        slots: int = 8,
        tile_bytes: int | None = None,
        topology: Topology,
    ) -> NetworkSimulation: ...

    def simulate(
        self,
        nbytes: int,
        alpha: Cost | None = None,
        beta: Cost | None = None,
        gamma: Cost = 0.0,
        *,
        slots: int = 8,
        tile_bytes: int | None = None,
        topology: Topology | None = None,
    ) -> Simulation | NetworkSimulation:
        """Simulates the programs in time, on links of given costs.

        A message of b bytes takes alpha + b beta, and holds the sender's sending port and the
        receiver's receiving port. Combining takes gamma per byte of each further source.

        Args:
            nbytes: size of the payload: of a rank's input or output, whichever is larger.
            alpha: latency, seconds: one number, n x n numbers [src][dst], or f(src, dst).
            beta: inverse bandwidth, seconds per byte, likewise.
            gamma: inverse rate of reduction at dst, seconds per byte, likewise.
            slots: messages that a link holds until they are read.
            tile_bytes: the message, or each of its blocks, is cut into tiles of this size; None is
                one tile.
            topology: a cluster of as many ranks, instead of alpha, beta and gamma: its links are
                shared, max-min fair, by the messages that cross them.

        Returns:
            Times, sent bytes and all events; with a topology, times and the use of the links.

        Raises:
            UsageError: a size is negative, or the ranks deadlock with so few slots.

        Cost: about a microsecond per transfer.
        Source: the model of R. Hockney, "The communication challenge for MPP", 1994; with a
            topology, docs/simulation.md.
        """
        if topology is not None:
            if alpha is not None or beta is not None or gamma != 0.0:
                raise UsageError(
                    "simulate: a topology replaces alpha, beta and gamma: leave them out"
                )
            from pycoll.topology.simulated_world import World

            world = World.of_schedule(topology, self)
            return world.simulate(nbytes, slots=slots, tile_bytes=tile_bytes)
        if alpha is None or beta is None:
            raise UsageError("simulate: expected alpha and beta, or a topology")
        core = _core.simulate_programs(
            self.programs(),
            whole_number(nbytes, "nbytes", 0, _MAX_BYTES),
            0 if tile_bytes is None else whole_number(tile_bytes, "tile_bytes", 0, _MAX_BYTES),
            whole_number(slots, "slots", 1, _MAX_SLOTS),
            self._matrix(alpha, "alpha"),
            self._matrix(beta, "beta"),
            self._matrix(gamma, "gamma"),
        )
        events = tuple(
            Event(e.kind, e.rank, e.peer, e.step, e.tile, e.chunks, e.nbytes, e.start_s, e.end_s)
            for e in core.events
        )
        return Simulation(core.time_s, tuple(core.rank_time_s), tuple(core.sent_bytes), events)

    def explain(self, *, fuse: bool = True, multicast: bool = True) -> str:
        """Formats the programs of all ranks as text, one line per step."""
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

    def _place(self, rank: int, chunk: int) -> tuple[int, int]:
        return (
            whole_number(rank, "rank", 0, self.n - 1),
            whole_number(chunk, "chunk", 0, self.num_chunks - 1),
        )

    def _matrix(self, cost: Cost, name: str) -> list[float]:
        ranks = range(self.n)
        try:
            if callable(cost):
                costs = [cost(src, dst) if src != dst else 0.0 for src in ranks for dst in ranks]
            elif isinstance(cost, (int, float)):
                costs = [cost] * self.n**2
            else:
                costs = [value for row in cost for value in row]
            numbers = [float(value) for value in costs]
        except (TypeError, ValueError, OverflowError):
            numbers = [-1.0]
        if not all(0 <= number < math.inf for number in numbers):
            raise UsageError(
                f"simulate: {name} is {shown(cost)}, expected a number of 0 or more, "
                f"{self.n} x {self.n} of them, or a function of src and dst"
            )
        return numbers
