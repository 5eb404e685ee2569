"""Parts of a cluster: levels of switches, ranks, stragglers, jitter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pycoll import _core
from pycoll.arguments import real_number, shown, whole_number
from pycoll.errors import UsageError
from pycoll.topology.device import Device

if TYPE_CHECKING:
    from pycoll.topology.result import NetworkSimulation
    from pycoll.topology.simulated_world import World

__all__ = ["Jitter", "Level", "Straggler", "Topology", "uniform"]

Pairs = tuple[tuple[float, ...], ...]
RANK = "rank"
_MAX_SIZE = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of switches: it joins ranks into hosts, or hosts into racks, and so on.

    Args:
        name: of a unit, such as `host` or `rack`.
        size: members of a unit: ranks, or units of the level below.
        link_bytes_per_s: of one link of a member into its unit's switch, each direction.
        latency_s: one way between two members, all of the way, in seconds.
        num_links: links of each member. A rank uses number (its index in the member) modulo it.
        rails: link i of every member leads to switch i. Traffic that must change rail does so
            inside the host. For the second level only.
        carries_outside: whether messages that leave the unit use these links: False for NVLink.
        pair_bytes_per_s: size x size, row by source: bandwidth of a circuit for each pair of
            members, which their messages use in addition to the members' links.
        pair_latency_s: size x size, row by source, instead of latency_s.
    """

    name: str
    size: int
    link_bytes_per_s: float
    latency_s: float = 0.0
    num_links: int = 1
    rails: bool = False
    carries_outside: bool = True
    pair_bytes_per_s: Pairs | None = None
    pair_latency_s: Pairs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Units that are slower than other units of their level.

    Args:
        level: `rank`, or the name of a level.
        units: numbers of the units in the whole cluster.
        compute_factor: slow-down of reductions and message starts on their ranks.
        link_factor: fraction of the bandwidth of their links into the level above.
        delay_s: delay of their ranks' entry into the collective, in seconds.
    """

    level: str
    units: tuple[int, ...]
    compute_factor: float = 1.0
    link_factor: float = 1.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random delays of exponential distribution, the same for the same seed.

    Args:
        seed: seed of the sample.
        message_s: mean delay of each message before it leaves, in seconds.
        start_s: mean delay of each rank's entry into the collective, in seconds.
    """

    seed: int = 0
    message_s: float = 0.0
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster: its links, hosts and ranks.

    Args:
        levels: levels from the inside out; the first one joins ranks.
        name: name for titles.
        overhead_s: what a message costs the rank that sends it, in seconds.
        gamma_s_per_byte: of reducing, per byte of every operand after the first.
        stragglers: units that are slower.
        jitter: random delays.
        device: the device of each rank, for `pc.plan`; collectives do not use it.

    Raises:
        UsageError: a number is invalid, two levels have one name, or a straggler has no level.
    """

    levels: tuple[Level, ...]
    name: str = ""
    overhead_s: float = 0.0
    gamma_s_per_byte: float = 0.0
    stragglers: tuple[Straggler, ...] = ()
    jitter: Jitter = Jitter()
    device: Device | None = None

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        for name in names:
            if name == RANK or names.count(name) > 1:
                raise UsageError(f"topology: a second level is called {name!r}")
        self.fabric()  # raises for invalid values

    @property
    def num_ranks(self) -> int:
        return math.prod(level.size for level in self.levels)

    def ranks_per(self, level: str) -> int:
        """Ranks of a unit of that level; 1 for `rank`.

        Raises:
            UsageError: there is no such level.
        """
        return math.prod(inner.size for inner in self.levels[: self._member_level(level)])

    def num_units(self, level: str) -> int:
        """Units of that level in the whole cluster.

        Raises:
            UsageError: there is no such level.
        """
        return self.num_ranks // self.ranks_per(level)

    def resized(self, num_ranks: int) -> Topology:
        """Makes a topology with more or fewer members of the outermost level.

        Args:
            num_ranks: a multiple of the ranks of one member.

        Returns:
            A new topology; stragglers beyond its size are left out.

        Raises:
            UsageError: num_ranks is not such a multiple.
        """
        outer = self.levels[-1]
        inside = self.num_ranks // outer.size
        if num_ranks < 1 or num_ranks % inside:
            raise UsageError(
                f"cannot resize topology {self.name!r} to {num_ranks} ranks: expected a multiple "
                f"of {inside}, the ranks of one member of its outermost level {outer.name!r}"
            )
        if num_ranks == self.num_ranks:
            return self
        if outer.pair_bytes_per_s or outer.pair_latency_s:
            raise UsageError(
                f"cannot resize level {outer.name!r}: its pair matrices have a fixed size"
            )
        levels = (*self.levels[:-1], replace(outer, size=num_ranks // inside))
        smaller = replace(self, levels=levels, stragglers=())
        kept = (
            replace(s, units=tuple(u for u in s.units if u < smaller.num_units(s.level)))
            for s in self.stragglers
        )
        return replace(smaller, stragglers=tuple(s for s in kept if s.units))

    def fabric(self) -> Any:
        """The _core.Fabric that the simulator takes.

        Raises:
            UsageError: a number makes no sense.

        Cost: microseconds per rank.
        """
        if not self.levels:
            raise UsageError("topology: expected at least one level")
        for level in self.levels:
            for name in ("size", "num_links"):
                what = f"topology: {name} of {level.name!r}"
                whole_number(getattr(level, name), what, -_MAX_SIZE, _MAX_SIZE)
            for name in ("link_bytes_per_s", "latency_s"):
                real_number(getattr(level, name), f"topology: {name} of {level.name!r}")
        real_number(self.overhead_s, "topology: overhead_s")
        real_number(self.gamma_s_per_byte, "topology: gamma_s_per_byte")
        fabric = _core.Fabric(
            [
                _core.FabricLevel(
                    level.name,
                    level.size,
                    level.num_links,
                    level.rails,
                    level.carries_outside,
                    level.link_bytes_per_s,
                    level.latency_s,
                    _flat(level.pair_bytes_per_s),
                    _flat(level.pair_latency_s),
                )
                for level in self.levels
            ]
        )
        n, jitter = self.num_ranks, self.jitter
        overhead, gamma = [self.overhead_s] * n, [self.gamma_s_per_byte] * n
        start = [0.0] * n
        if jitter.start_s > 0:
            start = [
                _core.exponential_delay_s(jitter.seed, n + rank, 0, jitter.start_s)
                for rank in range(n)
            ]
        for straggler in self.stragglers:
            level_idx, ranks = self._member_level(straggler.level), self.ranks_per(straggler.level)
            for unit in straggler.units:
                if not 0 <= unit < n // ranks:
                    raise UsageError(
                        f"topology: straggler {straggler.level} {unit}: expected a number below "
                        f"{n // ranks}"
                    )
                if straggler.link_factor != 1:
                    if level_idx == len(self.levels):
                        raise UsageError(f"topology: {straggler.level} has no links to slow down")
                    fabric.scale_links(level_idx, unit, straggler.link_factor)
                for rank in range(unit * ranks, (unit + 1) * ranks):
                    overhead[rank] *= straggler.compute_factor
                    gamma[rank] *= straggler.compute_factor
                    start[rank] += straggler.delay_s
        fabric.set_ranks(overhead, gamma, start)
        return fabric

    def prepare(
        self,
        collective: str,
        algorithm: str,
        *,
        root: int = 0,
        groups: Sequence[str] | None = None,
        between: str = "ring",
        compress: bool = True,
    ) -> World:
        """Places a collective on the cluster, for simulations with payloads of any size.

        Args:
            collective: such as `all_reduce`.
            algorithm: from schedule.algorithms(collective), or `hierarchical`.
            root: rank whose value counts, for collectives that have one.
            groups: of `hierarchical`: levels inside which it works first, from the inside out.
                None is the innermost one.
            between: of `hierarchical`: the algorithm between the last groups.
            compress: simulate equivalent ranks as one; the result is the same.

        Returns:
            The prepared collective.

        Raises:
            UsageError: no such collective, algorithm or level, or too many moves for so many ranks.

        Cost: microseconds per rank and step of its script; a second or so for 10,000 ranks.
        """
        from pycoll.topology.simulated_world import World

        return World.of_algorithm(self, collective, algorithm, root, groups, between, compress)

    def simulate(
        self, collective: str, algorithm: str, nbytes: int, **options: Any
    ) -> NetworkSimulation:
        """Simulates a collective in time on this cluster.

        Args:
            collective: such as `all_reduce`.
            algorithm: from schedule.algorithms(collective), or `hierarchical`.
            nbytes: of the message: the larger one of what a rank brings and what it gets.
            options: those of prepare() and of World.simulate().

        Returns:
            Times, and what the links carried.

        Raises:
            UsageError: as prepare() and World.simulate() do.

        Cost: a third of a microsecond per message of ranks that differ; see docs/simulation.md.
        """
        names = ("root", "groups", "between", "compress")
        of_world = {name: options.pop(name) for name in names if name in options}
        return self.prepare(collective, algorithm, **of_world).simulate(nbytes, **options)

    def _member_level(self, name: str) -> int:
        """The number of the level whose members are units of that name."""
        known = [RANK, *(level.name for level in self.levels)]
        if name not in known:
            raise UsageError(
                f"topology: no level is called {name!r}: expected one of {', '.join(known)}"
            )
        return known.index(name)


def uniform(
    num_ranks: int,
    *,
    latency_s: float,
    link_bytes_per_s: float,
    gamma_s_per_byte: float = 0.0,
    overhead_s: float = 0.0,
) -> Topology:
    """Ranks on one switch that does not block.

    Args:
        num_ranks: how many.
        latency_s: of a message, in seconds.
        link_bytes_per_s: of each rank's link, each direction.
        gamma_s_per_byte: of reducing, per byte of every operand after the first.
        overhead_s: what a message costs the rank that sends it, in seconds.

    Returns:
        The topology: a message of b bytes takes overhead_s + latency_s + b / link_bytes_per_s.

    Raises:
        UsageError: a number makes no sense.
    """
    level = Level(
        name="switch", size=num_ranks, link_bytes_per_s=link_bytes_per_s, latency_s=latency_s
    )
    return Topology(
        levels=(level,),
        name=f"{shown(num_ranks)} ranks on one switch",
        overhead_s=overhead_s,
        gamma_s_per_byte=gamma_s_per_byte,
    )


def _flat(pairs: Pairs | None) -> list[float]:
    return [value for row in pairs or () for value in row]
