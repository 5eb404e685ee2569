"""A collective placed on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycoll import _core, schedule
from pycoll.errors import UsageError
from pycoll.topology.model import Topology
from pycoll.topology.result import LevelUse, NetworkSimulation, Timeline

__all__ = ["World"]

MAX_MESSAGES = 2_000_000_000
_BINS = 300


class World:
    """A collective on a cluster, ready to simulate. Made by Topology.prepare()."""

    def __init__(
        self, topology: Topology, fabric: Any, core: Any, collective: str, algorithm: str
    ) -> None:
        self._topology = topology
        self._fabric = fabric
        self._core = core
        self._row = next(row for row in _core.collectives() if row.name == collective)
        self.collective = collective
        self.algorithm = algorithm

    @classmethod
    def of_algorithm(
        cls,
        topology: Topology,
        collective: str,
        algorithm: str,
        root: int,
        groups: Sequence[str] | None,
        between: str,
        compress: bool,
    ) -> World:
        """See Topology.prepare()."""
        sizes, label = [], algorithm
        if algorithm == "hierarchical":
            names = [topology.levels[0].name] if groups is None else list(groups)
            sizes = [topology.ranks_per(name) for name in names]
            label = algorithm_label(names, between)
        elif groups is not None:
            raise UsageError(f"{algorithm} does not support groups: only hierarchical does")
        elif schedule.info(collective, algorithm).sent_fraction is None:  # a registered one
            built = schedule.build(collective, algorithm, topology.num_ranks, root)
            return cls.of_schedule(topology, built, compress)
        fabric = topology.fabric()
        if not 0 <= root < topology.num_ranks:
            raise UsageError(f"root {root} is not one of {topology.num_ranks} ranks")
        core = _core.FlowWorld(
            fabric, collective, algorithm, root, sizes, between, compress and _is_steady(topology)
        )
        return cls(topology, fabric, core, collective, label)

    @classmethod
    def of_schedule(cls, topology: Topology, placed: Any, compress: bool = True) -> World:
        """Places a schedule, such as a registered one.

        Args:
            topology: with as many ranks.
            placed: a pycoll.schedule.Schedule.
            compress: simulate equivalent ranks as one; the result is the same.

        Returns:
            The prepared collective.

        Raises:
            UsageError: another number of ranks, or a rank would have more than 64 peers.
        """
        fabric = topology.fabric()
        programs = placed.programs(multicast=False)
        core = _core.FlowWorld.of_programs(fabric, programs, compress and _is_steady(topology))
        return cls(topology, fabric, core, placed.collective, placed.algorithm)

    @property
    def num_classes(self) -> int:
        """Number of classes of equivalent ranks, or of ranks where classes do not pay."""
        return self._core.num_actors

    def simulate(
        self,
        nbytes: int,
        *,
        tile_bytes: int | None = None,
        slots: int = 8,
        timeline: bool = False,
        max_messages: int = MAX_MESSAGES,
        progress: Callable[[float], None] | None = None,
    ) -> NetworkSimulation:
        """Simulates the collective in time.

        Args:
            nbytes: of the message: the larger one of what a rank brings and what it gets.
            tile_bytes: the message, or each of its blocks, is cut into tiles of this size; None is
                one tile.
            slots: messages that a link from rank to rank holds until they are read.
            timeline: also return the use of the links over time.
            max_messages: largest number of messages to simulate.
            progress: called regularly with the finished part, 0 to 1.

        Returns:
            Times, and what the links carried.

        Raises:
            UsageError: a size is negative, more than max_messages would be needed, or the ranks
                deadlock with so few slots.

        Cost: a third of a microsecond per message of ranks that differ. Where messages of many
            ranks share links and jitter separates them, also the sharing: microseconds per message.
        Source: LogGP (A. Alexandrov et al., SPAA 1995) with max-min fair links (D. Bertsekas,
            R. Gallager, "Data Networks", 1992); see docs/simulation.md.
        """
        if nbytes < 0 or (tile_bytes is not None and tile_bytes < 1):
            raise UsageError(
                "simulate: expected nbytes >= 0 and tile_bytes >= 1, got "
                f"nbytes {nbytes}, tile_bytes {tile_bytes}"
            )
        jitter = self._topology.jitter
        result = self._core.simulate(
            float(nbytes),
            self._tile_fraction(nbytes, tile_bytes),
            slots,
            jitter.seed,
            jitter.message_s,
            _BINS if timeline else 0,
            max_messages,
            progress,
        )
        num_ranks = self._topology.num_ranks
        return NetworkSimulation(
            collective=self.collective,
            algorithm=self.algorithm,
            nbytes=nbytes,
            num_ranks=num_ranks,
            time_s=result.time_s,
            rank_time_s=tuple(result.rank_time_s),
            levels=self._levels(nbytes, result.time_s),
            num_classes=self.num_classes,
            num_messages=result.num_messages,
            inexact=self._inexact(nbytes),
            busbw_factor=self._row.busbw_factor(num_ranks),
            timeline=self._timeline(result) if timeline else None,
        )

    def _tile_fraction(self, nbytes: int, tile_bytes: int | None) -> float:
        if nbytes == 0 or tile_bytes is None:
            return 1.0
        block = nbytes / self._row.blocks_per_payload(self._topology.num_ranks)
        return min(1.0, tile_bytes / block)

    def _levels(self, nbytes: int, time_s: float) -> tuple[LevelUse, ...]:
        uses = []
        for level, load in zip(self._topology.levels, self._core.loads, strict=True):
            if load.num_links == 0:
                continue
            busy_s = load.fraction * nbytes / load.bytes_per_s
            busiest_s = load.busiest_fraction * nbytes / load.busiest_bytes_per_s
            uses.append(
                LevelUse(
                    level.name,
                    load.num_links,
                    load.fraction * nbytes,
                    busy_s / time_s if time_s > 0 else 0.0,
                    self._fabric.link_name(load.busiest_link),
                    busiest_s / time_s if time_s > 0 else 0.0,
                )
            )
        return tuple(uses)

    def _timeline(self, result: Any) -> Timeline:
        num_bins = int(result.time_s / result.bin_s) + 1
        utilization = {}
        rows = zip(self._topology.levels, self._core.loads, result.level_nbytes, strict=False)
        for level, load, nbytes in rows:
            if load.num_links:
                most = load.bytes_per_s * result.bin_s
                utilization[level.name] = tuple(value / most for value in nbytes[:num_bins])
        return Timeline(result.bin_s, utilization)

    def _inexact(self, nbytes: int) -> tuple[str, ...]:
        notes = []
        jitter = self._topology.jitter
        if jitter.message_s > 0 or jitter.start_s > 0:
            notes.append(f"random delays are one sample, of seed {jitter.seed}")
        if self.collective != "all_reduce" and self.algorithm.startswith("hierarchical"):
            notes.append("blocks that do not lie side by side travel as one message")
        if nbytes % self._topology.num_ranks:
            notes.append("chunks are not rounded to whole bytes")
        return tuple(notes)


def algorithm_label(groups: Sequence[str], between: str) -> str:
    """`hierarchical:host+site/ring`: parse_algorithm() reads it."""
    return f"hierarchical:{'+'.join(groups)}/{between}"


def _is_steady(topology: Topology) -> bool:
    """Random delays make every rank differ."""
    return topology.jitter.message_s == 0 and topology.jitter.start_s == 0
