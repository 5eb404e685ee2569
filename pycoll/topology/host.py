"""One host as nested domains of cores: who shares an L3, a NUMA node, a socket."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pycoll.arguments import shown
from pycoll.errors import UsageError
from pycoll.topology.model import Level, Topology

__all__ = ["DomainLevel", "Host"]

# Defaults of Host.topology(), rounded from published measurements of servers of 2021 to 2023: they
# describe no machine exactly. Time of a cache line between two cores whose smallest common domain
# is this one, and the rate of a member's path into its domain.
LATENCY_S = {"l3": 25e-9, "numa": 100e-9, "socket": 110e-9, "host": 200e-9}
LINK_BYTES_PER_S = {"core": 25e9, "l3": 50e9, "numa": 100e9, "socket": 100e9}
OVERHEAD_S = 20e-9
GAMMA_S_PER_BYTE = 1 / 20e9
CORE = "core"


@dataclass(frozen=True, slots=True)
class DomainLevel:
    """The domains of one level.

    Args:
        name: `l3`, `numa`, `socket` or `host`; of several that coincide, the outermost.
        units: CPUs of each domain.
        also: names of the levels that coincide with it, from the inside out.
    """

    name: str
    units: tuple[tuple[int, ...], ...]
    also: tuple[str, ...] = ()

    def unit_of(self, cpu: int) -> int:
        """Number of the domain that has this CPU."""
        return next(number for number, unit in enumerate(self.units) if cpu in unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The cores of a host and their domains. Made by read_host().

    Args:
        cores: CPUs of each core, its SMT siblings, in the order of the tree: rank r of topology()
            is core r.
        levels: domains from the inside out; the last level is the host.
        distances: by NUMA node, its distances to all nodes as the firmware gives them; 10 is local.
        nodes: CPUs of each NUMA node; a node that has memory alone, such as a GPU's, has none.
        notes: what sysfs does not have.
        num_online: CPUs that are online, also those that do not count.
    """

    cores: tuple[tuple[int, ...], ...]
    levels: tuple[DomainLevel, ...]
    distances: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_online: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Members of a domain, for each level from the inside out: cores, then domains.

        Raises:
            UsageError: domains of a level differ in size.
        """
        sizes = []
        below = [core[0] for core in self.cores]  # the first CPU of each member
        for level, member in zip(self.levels, self._members(), strict=True):
            counts = {len(set(below) & set(unit)) for unit in level.units}
            if len(counts) > 1:
                raise UsageError(
                    f"the {level.name} domains of this host have {_either(counts)} {member}s: a "
                    "topology needs as many in each; pass the cpus that are to count"
                )
            sizes.append(counts.pop())
            below = [min(unit) for unit in level.units]
        return tuple(sizes)

    def topology(
        self,
        *,
        latency_s: Mapping[str, float] | None = None,
        link_bytes_per_s: Mapping[str, float] | None = None,
        overhead_s: float = OVERHEAD_S,
        gamma_s_per_byte: float = GAMMA_S_PER_BYTE,
    ) -> Topology:
        """Makes a topology with a rank on each core and a level for each domain.

        Args:
            latency_s: by name of a level, seconds between two cores whose smallest common domain is
                of this level. Levels that are not named keep the defaults of this file.
            link_bytes_per_s: by name of a member (`core`, `l3`, `numa`, `socket`), the rate of its
                path into its domain, each direction.
            overhead_s: of a message, on the rank that sends it, in seconds.
            gamma_s_per_byte: of reducing, per byte of every operand after the first.

        Returns:
            The topology; rank r is the core `cores[r]`.

        Raises:
            UsageError: domains of a level differ in size, or a cost is of no level.

        Source: the defaults are rounded from published core-to-core latencies and link rates; they
            are not measured on such a machine.
        """
        latencies = _costs(LATENCY_S, latency_s, "latency_s")
        rates = _costs(LINK_BYTES_PER_S, link_bytes_per_s, "link_bytes_per_s")
        levels = tuple(
            Level(
                name=level.name,
                size=size,
                link_bytes_per_s=rates[member],
                # Domains that coincide are as close as the innermost of them.
                latency_s=latencies[(*level.also, level.name)[0]],
            )
            for level, size, member in zip(self.levels, self.sizes, self._members(), strict=True)
        )
        return Topology(
            levels=levels,
            name=f"host of {len(self.cores)} cores",
            overhead_s=overhead_s,
            gamma_s_per_byte=gamma_s_per_byte,
        )

    def smallest_domain(self, cpus: Collection[int]) -> str | None:
        """Name of the smallest domain that has all these CPUs.

        Args:
            cpus: numbers of CPUs.

        Returns:
            `core`, or the name of a level; None if a CPU is not one of this host's.
        """
        wanted = set(cpus)
        if any(wanted <= set(core) for core in self.cores):
            return CORE
        for level in self.levels:
            if any(wanted <= set(unit) for unit in level.units):
                return level.name
        return None

    def describe(self) -> str:
        """The tree as text: a line for each level, the nodes' distances, and what is missing."""
        num_cpus = sum(map(len, self.cores))
        lines = [f"{len(self.cores)} cores, {num_cpus} of {self.num_online} CPUs that are online"]
        for level, member in zip(self.levels, self._members(), strict=True):
            first = {core[0] for core in self.cores}
            counts = {len(first & set(unit)) for unit in level.units}
            same = f" (also {', '.join(level.also)})" if level.also else ""
            lines.append(
                f"{level.name}{same}: {len(level.units)} of {_either(counts)} cores"
                + ("" if member == CORE else f", made of {member} domains")
            )
        for node, distances in self.distances.items():
            what = "" if self.nodes.get(node) else ", memory without CPUs"
            lines.append(f"node {node}{what}: distances {' '.join(map(str, distances)) or '-'}")
        return "\n".join([*lines, *self.notes])

    def _members(self) -> list[str]:
        return [CORE, *(level.name for level in self.levels[:-1])]


def _either(counts: Collection[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


def _costs(
    defaults: Mapping[str, float], own: Mapping[str, float] | None, what: str
) -> dict[str, float]:
    for name in own or {}:
        if name not in defaults:
            raise UsageError(
                f"{what}: no level is called {shown(name)}: expected one of {', '.join(defaults)}"
            )
    return {**defaults, **(own or {})}
