"""Finds annotations that share out every weight with the fewest bytes.

Source: Wang, Huang, Li, Tofu, EuroSys 2019: each tensor is cut along the dimension of least
communication. Tofu cuts for two groups of workers and then each group's part again, maybe along
another dimension; one axis of a mesh has one cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.features.annotate.annotations import AXIS, Annotations, specs_of
from pycoll.parallel.features.annotate.cuts import Cut
from pycoll.parallel.features.annotate.graph import Graph, Value, trace
from pycoll.parallel.features.annotate.propagate import propagate
from pycoll.parallel.features.annotate.sharding import describe

_BLOCKS = (1, 2, 3)  # gates and values; queries, keys and values
_SWEEPS = 4


def auto_annotate(model: nn.Module, x: Any = None, *, ranks: int) -> Annotations:
    """Chooses a dimension for each weight matrix and filter, so that a step sends the fewest bytes.

    Weights get their first choice in the order of the model, unless the shardings of earlier ones
    lead to theirs. Then each choice is made again, given all others, until none changes.

    Args:
        model: The model before `parallelize`; it may be on the device "meta".
        x: A batch as for `model.step`, of which only shapes and dtypes matter; None: two sequences
            of 8 token numbers.
        ranks: Size of the axis tp.

    Returns:
        Annotations for `parallelize(..., annotate=)`. Weights of which no dimension divides, and
        vectors, are not annotated.

    Raises:
        UsageError: The model cannot be traced, or no weight can be shared out.

    Cost: one forward pass without arithmetic, and a propagation for each dimension of each weight.
    """
    annotations = Annotations({}) if x is None else Annotations({}, x)
    graph, _ = trace(model, model.forward, specs_of(model), *annotations.call_of(model))
    chosen: dict[Value, Cut] = {}
    weights = [v for v in graph.states if v in graph.learning and graph.fakes[v].dim() > 1]
    for value in weights:
        if value not in propagate(graph, chosen, ranks).cuts:
            _choose(graph, chosen, value, ranks)
    for _ in range(_SWEEPS):
        before = dict(chosen)
        for value in list(chosen):
            _choose(graph, chosen, value, ranks)
        if chosen == before:
            break
    if not chosen:
        raise UsageError(
            f"auto_annotate: no weight of {type(model).__name__} has a dimension that divides "
            f"among {ranks} ranks: choose a smaller number"
        )
    placements = {
        graph.states[value]: _dims(cut, graph.fakes[value].dim()) for value, cut in chosen.items()
    }
    return Annotations(placements, annotations.sample)


def sent_bytes(graph: Graph, annotated: dict[Value, Cut], ranks: int) -> float:
    """Bytes that a rank sends in a step, by rings, for its activations and whole weights."""
    sharded = propagate(graph, annotated, ranks)
    times = {"all_reduce": 2}
    total = sum(times.get(c.kind, 1) * c.nbytes for c in describe(sharded, AXIS).collectives)
    total += sum(2 * graph.nbytes(value) for value in sharded.partial)
    return total * (ranks - 1) / ranks


def options(graph: Graph, value: Value, ranks: int) -> Iterator[Cut]:
    """The cuts of a weight that divide."""
    shape = tuple(graph.fakes[value].shape)
    cuts = (Cut(dim, blocks) for blocks in _BLOCKS for dim in range(len(shape)))
    return (cut for cut in cuts if cut.divides(shape, ranks))


def _choose(graph: Graph, chosen: dict[Value, Cut], value: Value, ranks: int) -> None:
    """Chooses the cut of a weight that sends the least, given the other choices."""
    others = {of: cut for of, cut in chosen.items() if of != value}
    best = min(
        options(graph, value, ranks),
        key=lambda cut: sent_bytes(graph, {**others, value: cut}, ranks),
        default=None,
    )
    if best is not None:
        chosen[value] = best


def _dims(cut: Cut, length: int) -> tuple[str | None, ...]:
    text = AXIS if cut.blocks == 1 else f"{AXIS}:{cut.blocks}"
    return tuple(text if i == cut.dim else None for i in range(length))


__all__ = ["auto_annotate", "options", "sent_bytes"]
