"""Time of collectives and messages along the axes of a mesh, on a cluster.

Invariant: ranks of a mesh are those of the cluster in order, tp fastest and pp slowest. All groups
of an axis communicate at the same time, so they share the links of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pycoll.errors import UsageError
from pycoll.parallel.core.mesh_sizes import AXES
from pycoll.topology import Topology

# Parts of a ring's way: rounds of n - 1 messages, and payloads that a rank sends.
_ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
ALGORITHMS = ("ring", "hierarchical")


@dataclass(frozen=True, slots=True)
class _Way:
    """What a ring over a group crosses: seconds of latency, seconds per byte, reduction."""

    size: int
    alpha_s: float
    beta_s: float
    gamma_s: float

    def seconds(self, collective: str, nbytes: float) -> float:
        rounds, n = _ROUNDS[collective], self.size
        reduced = nbytes * (n - 1) / n if collective in ("all_reduce", "reduce_scatter") else 0.0
        sent = rounds * (n - 1) / n * nbytes
        return rounds * (n - 1) * self.alpha_s + sent * self.beta_s + reduced * self.gamma_s


class Network:
    """Collectives of a mesh on a cluster."""

    def __init__(
        self,
        cluster: Topology,
        sizes: Mapping[str, int],
        algorithms: tuple[str, ...] = ALGORITHMS,
    ) -> None:
        """Places a mesh on a cluster.

        Args:
            cluster: The cluster; the mesh uses its first ranks.
            sizes: Sizes of the axes.
            algorithms: Algorithms that may be used; the fastest one is.

        Raises:
            UsageError: The mesh has more ranks than the cluster, or there is no such algorithm.
        """
        self._sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        num_ranks = math.prod(self._sizes.values())
        if num_ranks > cluster.num_ranks:
            raise UsageError(
                f"plan: the mesh has {num_ranks} ranks, cluster {cluster.name!r} has "
                f"{cluster.num_ranks}"
            )
        unknown = set(algorithms) - set(ALGORITHMS)
        if unknown or not algorithms:
            raise UsageError(f"plan: algorithms are {algorithms}, expected some of {ALGORITHMS}")
        self._cluster, self._algorithms, self._num_ranks = cluster, algorithms, num_ranks
        self._known: dict[tuple[str, ...], tuple[_Way, list[_Way]]] = {}

    def size(self, *axes: str) -> int:
        """Number of ranks of a group along some axes."""
        return math.prod(self._sizes[axis] for axis in axes)

    def collective_s(self, collective: str, nbytes: float, *axes: str) -> float:
        """Seconds of a collective over the groups along some axes.

        Args:
            collective: Its name.
            nbytes: Its payload in bytes: of the gathered array, or of each rank's input.
            axes: The axes, such as "dp" or "dp", "cp".

        Returns:
            The time of the fastest allowed algorithm; 0 in a group of one rank.

        Cost: microseconds.
        Source: Thakur et al., IJHPCA 19(1), 2005; bandwidths as in docs/simulation.md.
        """
        if collective not in _ROUNDS:
            return self.message_s(nbytes, *axes)
        if self.size(*axes) == 1:
            return 0.0
        flat, nested = self._ways(axes)
        times = []
        if "ring" in self._algorithms or not nested or collective == "all_to_all":
            times.append(flat.seconds(collective, nbytes))
        if "hierarchical" in self._algorithms and nested and collective != "all_to_all":
            times.append(_nested_s(nested, collective, nbytes))
        return min(times)

    def message_s(self, nbytes: float, *axes: str) -> float:
        """Seconds of a message to the next rank along an axis, while all ranks send one."""
        if self.size(*axes) == 1:
            return 0.0
        stride, size = self._stride(axes), self.size(*axes)
        level = self._outermost_level(stride, size)
        inside = math.prod(one.size for one in self._cluster.levels[:level])
        # The ranks of a unit whose next rank is in another unit share its links.
        leaving = min(inside, stride, self._num_ranks)
        links = self._cluster.levels[level]
        share = math.ceil(leaving / links.num_links) if level else 1
        latency_s = links.latency_s + self._cluster.overhead_s
        return latency_s + nbytes * share / links.link_bytes_per_s

    def _stride(self, axes: tuple[str, ...]) -> int:
        fastest = max(AXES.index(axis) for axis in axes)
        return math.prod(self._sizes[axis] for axis in AXES[fastest + 1 :])

    def _outermost_level(self, stride: int, size: int) -> int:
        """The level of the links between the first and the last rank of a group."""
        span, inside = stride * (size - 1), 1
        for number, level in enumerate(self._cluster.levels):
            inside *= level.size
            if span < inside:
                return number
        return len(self._cluster.levels) - 1

    def _ways(self, axes: tuple[str, ...]) -> tuple[_Way, list[_Way]]:
        """The ring over a group, and the rings of its levels from the inside out."""
        axes = tuple(axis for axis in axes if self._sizes[axis] > 1)
        if axes not in self._known:
            self._known[axes] = self._make_ways(axes)
        return self._known[axes]

    def _make_ways(self, axes: tuple[str, ...]) -> tuple[_Way, list[_Way]]:
        stride, size = self._stride(axes), self.size(*axes)
        gamma = self._cluster.gamma_s_per_byte
        outermost = self._outermost_level(stride, size)
        alpha = beta = 0.0
        nested: list[_Way] = []
        inside, before = 1, 1
        for number, level in enumerate(self._cluster.levels[: outermost + 1]):
            within = max(1, inside // stride)  # members of a group in one member of this level
            inside *= level.size
            members = min(size, max(1, inside // stride))
            if members == before:
                continue  # the group does not use these links
            latency_s = level.latency_s + self._cluster.overhead_s
            rings = min(stride, inside // level.size) if number else 1
            share = math.ceil(rings / level.num_links) if number else 1
            # A chunk passes all hops of the ring in turn, so their mean latency counts.
            hops = size / before - (0 if members == size else size / members)
            alpha += latency_s * hops / size
            beta = max(beta, share / level.link_bytes_per_s)
            # Inside out: each member of the inner ring carries its part through a link of its own.
            each = math.ceil(rings * within / level.num_links) if number else 1
            nested.append(_Way(members // before, latency_s, each / level.link_bytes_per_s, gamma))
            before = members
        return _Way(size, alpha, beta, gamma), nested if len(nested) > 1 else []


def _nested_s(nested: list[_Way], collective: str, nbytes: float) -> float:
    """Reduces inside out, and gathers outside in; each level moves its part of the payload."""
    *inner, outer = nested
    seconds, part = 0.0, nbytes
    for way in inner:
        if collective in ("all_reduce", "reduce_scatter"):
            seconds += way.seconds("reduce_scatter", part)
        if collective in ("all_reduce", "all_gather"):
            seconds += way.seconds("all_gather", part)
        part /= way.size
    return seconds + outer.seconds(collective, part)


__all__ = ["ALGORITHMS", "Network"]
