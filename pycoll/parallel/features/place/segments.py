"""Segments: consecutive calls of one rank, between what they receive and what they send.

A segment receives at its start and sends at its end. Segments are in the order of their first
calls, and what a segment receives was sent by an earlier one: the call that makes it ends its
segment, and stands before the call that needs it, which begins one. So the order fits all forward
passes, and its reverse all backward passes. Each rank runs its segments in this order and sends do
not block, so of all segments that are not done, the first one can always run: no deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from pycoll.parallel.features.place.graph import CallGraph


@dataclass(slots=True)
class Segment:
    """Calls that a rank runs without waiting, and whose backward pass is one of autograd.

    Attributes:
        rank: The rank.
        nodes: The calls, in their order.
        arrives: What the rank receives before them, for these and for later segments.
        leaves: The calls whose results other segments use.
        last_gradients: Parameters whose gradients are complete after its backward pass.
    """

    rank: int
    nodes: list[fx.Node] = field(default_factory=list)
    arrives: list[fx.Node] = field(default_factory=list)
    leaves: list[fx.Node] = field(default_factory=list)
    last_gradients: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its modules, or its functions if it has none."""
        modules = [str(node.target) for node in self.nodes if node.op == "call_module"]
        return ", ".join(modules or [node.name for node in self.nodes])


@dataclass(frozen=True, slots=True)
class Segments:
    """A graph in segments.

    Attributes:
        graph: The graph.
        segments: The segments of all ranks, in an order in which they can run.
        ranks: The rank of each call; None: any rank computes it.
        numbers: The place of each call in the graph.
    """

    graph: CallGraph
    segments: tuple[Segment, ...]
    ranks: Mapping[fx.Node, int | None]
    numbers: Mapping[fx.Node, int]

    @property
    def loss_rank(self) -> int:
        """The rank that has the model's output."""
        rank = self.ranks[self.graph.output]
        assert rank is not None
        return rank

    def users(self, node: fx.Node) -> list[int]:
        """The other ranks that use a call's result."""
        return others_of(node, self.ranks)

    def of(self, rank: int) -> list[Segment]:
        """The segments of a rank."""
        return [segment for segment in self.segments if segment.rank == rank]

    def free(self, rank: int) -> list[fx.Node]:
        """The calls of the batch alone that a rank needs, in order."""
        needed = {
            each for of in self.of(rank) for node in of.nodes for each in node.all_input_nodes
        }
        for node in reversed(self.graph.nodes):
            if node in needed and self.ranks[node] is None:
                needed.update(node.all_input_nodes)
        return [node for node in self.graph.nodes if node in needed and self.ranks[node] is None]


def others_of(node: fx.Node, ranks: Mapping[fx.Node, int | None]) -> list[int]:
    """The ranks that use a call's result, without its own."""
    found = {ranks[user] for user in node.users} - {None, ranks[node]}
    return sorted(rank for rank in found if rank is not None)


def segments_of(graph: CallGraph, ranks: Mapping[fx.Node, int | None]) -> Segments:
    """Cuts a graph into segments.

    Args:
        graph: The graph.
        ranks: The rank of each node; None: any rank computes it.
    """
    made: list[Segment] = []
    begun: dict[int, Segment] = {}  # the segment of each rank that takes more calls
    received: set[tuple[int, fx.Node]] = set()
    within: dict[fx.Node, Segment] = {}
    for node in graph.nodes:
        if (rank := ranks[node]) is None:
            continue
        arrives = [
            each
            for each in node.all_input_nodes
            if ranks[each] not in (None, rank) and (rank, each) not in received
        ]
        if arrives or rank not in begun:
            begun[rank] = Segment(rank, arrives=arrives)
            made.append(begun[rank])
            received.update((rank, each) for each in arrives)
        begun[rank].nodes.append(node)
        within[node] = begun[rank]
        if others_of(node, ranks):
            del begun[rank]
    for segment in made:
        segment.leaves = [
            node
            for node in segment.nodes
            if any(within[user] is not segment for user in node.users)
        ]
    seen: set[str] = set()
    for segment in made:  # backward passes come in reverse, so the first segment is the last one
        for name in [name for node in segment.nodes for name in graph.parameters[node]]:
            if name not in seen:
                seen.add(name)
                segment.last_gradients.append(name)
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return Segments(graph, tuple(made), ranks, numbers)


__all__ = ["Segment", "Segments", "segments_of"]
