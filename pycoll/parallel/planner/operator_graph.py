"""How to cut each operator of a graph over a world: the space of FlexFlow and of Tofu.

An operator is cut along dimensions, each time into halves. A cut along samples repeats the
weights, so their gradients are added up; a cut along a summed dimension adds outputs up. A tensor
between two operators that cut it differently is exchanged.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from pycoll.errors import UsageError

Cut = tuple[int, ...]  # number of halvings along each dimension of an operator
Cuts = tuple[Cut, ...]  # of all operators


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension along which an operator can be cut.

    Attributes:
        name: Its name, such as "sample" or "out".
        length: Its length, which the number of parts divides.
        summed: Bytes that all parts have to add up: weights for samples, outputs for a sum.
        shares: Whether a cut also shares out the operator's weights.
    """

    name: str
    length: int
    summed: int
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """An operator: its dimensions, and the bytes of its weights."""

    name: str
    dimensions: tuple[Dimension, ...]
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor from one operator to another.

    Attributes:
        source: Number of the operator that makes it.
        target: Number of the operator that takes it; it is behind the source.
        nbytes: Bytes of the tensor.
        same: Pairs of dimensions, of the source and of the target, that are one of the tensor.
    """

    source: int
    target: int
    nbytes: int
    same: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators in an order in which they can run; a space for `planner.search`.

    Attributes:
        nodes: The operators.
        edges: The tensors between them.
        world: Number of ranks, a power of two.
        memory: Bytes of weights that a rank may keep; None: no limit.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    world: int
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.world < 1 or self.world & (self.world - 1):
            raise UsageError(f"operator graph: world is {self.world}, expected a power of two")
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.nodes):
                raise UsageError(f"operator graph: {edge}: expected source < target < operators")

    def cuts_of(self, number: int, halvings: int) -> list[Cut]:
        """All ways to cut an operator by some halvings."""
        return _cuts(tuple(d.length for d in self.nodes[number].dimensions), halvings)

    def node_bytes(self, number: int, cut: Cut) -> float:
        """Bytes that all ranks send to add up what an operator's parts have in common."""
        dimensions = self.nodes[number].dimensions
        return sum(2.0 * (2**n - 1) * d.summed for d, n in zip(dimensions, cut, strict=True))

    def edge_bytes(self, edge: Edge, source: Cut, target: Cut) -> float:
        """Bytes that all ranks send so that the target's ranks have their parts of a tensor."""
        kept = 1.0
        for a, b in edge.same:
            kept /= 2 ** abs(source[a] - target[b])
        return 2.0 * edge.nbytes * (1 - kept)  # there, and the gradient back

    def weights(self, number: int, cut: Cut) -> float:
        """Bytes of weights that a rank keeps of an operator."""
        node = self.nodes[number]
        parts = (n for d, n in zip(node.dimensions, cut, strict=True) if d.shares)
        return node.weights / 2 ** sum(parts)

    def cost(self, cuts: Cuts) -> float:
        """Bytes that all ranks send in a step; infinity if the weights do not fit."""
        kept = sum(self.weights(i, cut) for i, cut in enumerate(cuts))
        if self.memory is not None and kept > self.memory:
            return math.inf
        total = sum(self.node_bytes(i, cut) for i, cut in enumerate(cuts))
        return total + sum(self.edge_bytes(e, cuts[e.source], cuts[e.target]) for e in self.edges)

    @property
    def _halvings(self) -> int:
        return self.world.bit_length() - 1

    def points(self) -> Iterator[Cuts]:
        """All cuts of all operators."""
        each = [self.cuts_of(i, self._halvings) for i in range(len(self.nodes))]
        return itertools.product(*each)

    def start(self) -> Cuts:
        """The first cuts that fit, or else the first ones."""
        first = next(iter(self.points()), None)
        if first is None:
            raise UsageError(f"operator graph: no operator can be cut into {self.world} parts")
        return next((cuts for cuts in self.points() if math.isfinite(self.cost(cuts))), first)

    def neighbors(self, cuts: Cuts) -> list[Cuts]:
        """Cuts that differ in one operator."""
        return [
            (*cuts[:i], other, *cuts[i + 1 :])
            for i in range(len(cuts))
            for other in self.cuts_of(i, self._halvings)
            if other != cuts[i]
        ]

    def halvings(self) -> Generator[list[Cuts], Cuts, None]:
        """Yields, for each halving, the cuts that have one more of them in every operator."""
        here: Cuts | None = None
        for count in range(1, self._halvings + 1):
            each = []
            for i in range(len(self.nodes)):
                grown = self.cuts_of(i, count)
                if here is not None:
                    before = here[i]
                    grown = [
                        c for c in grown if all(a <= b for a, b in zip(before, c, strict=True))
                    ]
                each.append(grown)
            here = yield list(itertools.product(*each))

    def best(self) -> Cuts | None:
        """The best cuts, operator by operator.

        A state has the cuts of those operators whose tensors are still to be used. A way to a
        state stays if no other one beats it in both bytes sent and bytes kept.
        """
        last = {
            e.source: max(x.target for x in self.edges if x.source == e.source)
            for e in (self.edges)
        }
        states: dict[tuple[tuple[int, Cut], ...], list[tuple[float, float, Cuts]]]
        states = {(): [(0.0, 0.0, ())]}
        for i in range(len(self.nodes)):
            into = [edge for edge in self.edges if edge.target == i]
            grown: dict[tuple[tuple[int, Cut], ...], list[tuple[float, float, Cuts]]] = {}
            for open_cuts, ways in states.items():
                known = dict(open_cuts)
                for cut in self.cuts_of(i, self._halvings):
                    sent = self.node_bytes(i, cut)
                    sent += sum(self.edge_bytes(e, known[e.source], cut) for e in into)
                    kept = self.weights(i, cut)
                    still = {**known, i: cut}
                    key = tuple((n, c) for n, c in still.items() if last.get(n, -1) > i)
                    grown.setdefault(key, []).extend(
                        (s + sent, k + kept, (*cuts, cut))
                        for s, k, cuts in ways
                        if self.memory is None or k + kept <= self.memory
                    )
            states = {key: _unbeaten(ways) for key, ways in grown.items()}
        ends = [way for ways in states.values() for way in ways]
        return min(ends)[2] if ends else None


@functools.lru_cache(maxsize=4096)
def _cuts(lengths: tuple[int, ...], halvings: int) -> list[Cut]:
    return [
        cut
        for cut in itertools.product(range(halvings + 1), repeat=len(lengths))
        if sum(cut) == halvings and all(n % 2**k == 0 for n, k in zip(lengths, cut, strict=True))
    ]


def _unbeaten(ways: list[tuple[float, float, Cuts]]) -> list[tuple[float, float, Cuts]]:
    """The ways that no other one beats in both numbers."""
    found: list[tuple[float, float, Cuts]] = []
    for way in sorted(ways):
        if not found or way[1] < found[-1][1]:
            found.append(way)
    return found


__all__ = ["Cut", "Cuts", "Dimension", "Edge", "Node", "OperatorGraph"]
