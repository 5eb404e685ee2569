"""Propagation of cuts from annotated tensors through the graph, forwards and backwards.

Element-wise operators and views pass a cut on first; products then take the way that moves the
fewest bytes, given the cuts that are known. Source: Xu et al., GSPMD, arXiv:2105.04663, section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from pycoll.parallel.features.annotate.conversions import Conversion, conversion
from pycoll.parallel.features.annotate.cuts import Cut, Way
from pycoll.parallel.features.annotate.graph import Graph, Operator, Value
from pycoll.parallel.features.annotate.operators import PRODUCTS, ways_from


@dataclass(frozen=True, slots=True)
class Step:
    """An operator of the sharded graph.

    Attributes:
        operator: The operator.
        way: How the ranks share it; None: every rank runs it whole.
        inputs: What is done to its arguments before, in order.
        output: The cut of a sum that is reduced and scattered; None: the sum is whole.
    """

    operator: Operator
    way: Way | None
    inputs: tuple[Conversion | None, ...]
    output: Cut | None = None


@dataclass(frozen=True, slots=True)
class Sharded:
    """A graph with a way for each operator.

    Attributes:
        graph: The graph.
        ranks: Number of ranks.
        steps: Its operators, in order.
        cuts: The cuts of its tensors; the others are whole.
        partial: Whole parameters whose gradients are partial sums.
    """

    graph: Graph
    ranks: int
    steps: tuple[Step, ...]
    cuts: dict[Value, Cut]
    partial: frozenset[Value]

    def is_logits(self, value: Value, cut: Cut) -> bool:
        """Whether a result stays a part, which losses take, or the trainer gathers for them."""
        return cut == Cut(self.graph.fakes[value].dim() - 1)


def propagate(graph: Graph, annotated: Mapping[Value, Cut | None], ranks: int) -> Sharded:
    """Finds a way for each operator that annotated tensors lead to.

    Args:
        graph: The graph.
        annotated: Cuts of tensors; None keeps one whole.
        ranks: Number of ranks.
    """
    known = dict(annotated)
    users: dict[Value, list[int]] = {}
    for i, operator in enumerate(graph.operators):
        for value in operator.values:
            users.setdefault(value, []).append(i)
    ways: dict[int, Way] = {}
    queue: list[tuple[bool, int]] = []

    def ask(value: Value) -> None:
        for i in users.get(value, ()):
            if i not in ways:
                heapq.heappush(queue, (graph.operators[i].name in PRODUCTS, i))

    for value, cut in known.items():
        if cut is not None:
            ask(value)
    while queue:
        _, i = heapq.heappop(queue)
        if i in ways:
            continue
        operator = graph.operators[i]
        way = _best(graph, operator, known, ranks)
        if way is None:
            continue
        ways[i] = way
        for value, cut in zip(operator.values, (*way.inputs, *way.outputs), strict=True):
            if cut is not None and value not in known and value not in graph.samples:
                known[value] = cut
                ask(value)
    return _steps(graph, known, ways, ranks)


def _best(
    graph: Graph, operator: Operator, known: Mapping[Value, Cut | None], ranks: int
) -> Way | None:
    ways = [
        way
        for place, value in enumerate(operator.values)
        if (cut := known.get(value)) is not None
        and (way := ways_from(operator, place, cut, ranks)) is not None
    ]
    return min(ways, key=lambda way: _moved(graph, operator, way, known), default=None)


def _moved(graph: Graph, operator: Operator, way: Way, known: Mapping[Value, Cut | None]) -> int:
    """Bytes of the tensors that are exchanged for a way, given the cuts that are known."""
    moved = 0
    for value, cut in zip(operator.values, (*way.inputs, *way.outputs), strict=True):
        is_result = value[0] == operator.node.name
        if is_result and way.summed:
            moved += graph.nbytes(value) * (1 if known.get(value) else 2)
        elif known.get(value) is not None and known[value] != cut:
            moved += graph.nbytes(value) * 2
    return moved


def _steps(
    graph: Graph, known: Mapping[Value, Cut | None], ways: Mapping[int, Way], ranks: int
) -> Sharded:
    cuts = {v: cut for v, cut in known.items() if cut is not None and v in graph.states}
    scattered: dict[int, Cut] = {}
    for i, chosen in ways.items():
        operator = graph.operators[i]
        result = operator.node.name, 0
        cut = known.get(result)
        if chosen.summed and cut is not None and _can_scatter(operator, cut, ranks):
            cuts[result] = scattered[i] = cut
        for j, cut in enumerate(chosen.outputs):
            if cut is not None:
                cuts[operator.node.name, j] = cut
    partial = _partial(graph, cuts, ways, scattered)
    steps = []
    for i, operator in enumerate(graph.operators):
        way = ways.get(i)
        inputs: list[Conversion | None] = []
        for place, value in enumerate(operator.inputs):
            want = None if way is None else way.inputs[place]
            shared = _is_shared(operator, place, way, i in scattered) and value not in partial
            made = conversion(graph, value, cuts.get(value), want, shared=shared)
            inputs.append(None if operator.name.startswith("new_") else made)  # reads no values
        steps.append(Step(operator, way, tuple(inputs), scattered.get(i)))
    return Sharded(graph, ranks, tuple(steps), cuts, partial)


def _can_scatter(operator: Operator, cut: Cut, ranks: int) -> bool:
    """Whether a sum can be scattered, before a bias of its own is added."""
    of_bias = {"linear": len(operator.outputs[0]) - 1, "conv2d": 1}.get(operator.name)
    return cut.blocks == 1 and cut.dim != of_bias and cut.divides(operator.outputs[0], ranks)


def _is_shared(operator: Operator, place: int, way: Way | None, scattered: bool) -> bool:
    """Whether the ranks do different work with an argument; a bias may be added to a whole sum."""
    if way is None or (way.summed and place == 2 and operator.name in ("linear", "conv2d")):
        return scattered
    return True


def _partial(
    graph: Graph,
    cuts: Mapping[Value, Cut],
    ways: Mapping[int, Way],
    scattered: Mapping[int, Cut],
) -> frozenset[Value]:
    """Whole parameters that ranks use for different work only, each time whole."""
    uses: dict[Value, list[bool]] = {}
    for i, operator in enumerate(graph.operators):
        way = ways.get(i)
        for place, value in enumerate(operator.inputs):
            if value in graph.states and value not in cuts:
                shared = _is_shared(operator, place, way, i in scattered)
                is_whole = way is None or way.inputs[place] is None
                uses.setdefault(value, []).append(shared and is_whole)
    return frozenset(v for v, of in uses.items() if all(of) and v in graph.learning)


__all__ = ["Sharded", "Step", "propagate"]
