"""What annotations make of a model: the shared tensors and the collectives, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycoll.parallel.features.annotate.conversions import Collective, Conversion
from pycoll.parallel.features.annotate.cuts import Cut
from pycoll.parallel.features.annotate.graph import Value
from pycoll.parallel.features.annotate.operators import is_known
from pycoll.parallel.features.annotate.propagate import Sharded


@dataclass(frozen=True, slots=True)
class Sharding:
    """A model's tensors and collectives on the ranks of an axis.

    Attributes:
        axis: The axis.
        ranks: Its number of ranks.
        parameters: Dimensions by full name: the axis where one is shared out.
        collectives: What a step with the sample sends, in the order of the forward pass.
        whole: Operators that are not shared though an argument is, with the reason.
    """

    axis: str
    ranks: int
    parameters: dict[str, tuple[str | None, ...]]
    collectives: tuple[Collective, ...]
    whole: tuple[str, ...]

    @property
    def nbytes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Number and bytes of the collectives, by phase and kind."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for one in self.collectives:
            calls, nbytes = found.get((one.phase, one.kind), (0, 0))
            found[one.phase, one.kind] = calls + 1, nbytes + one.nbytes
        return found

    def __str__(self) -> str:
        lines = [f"sharding over {self.axis}={self.ranks}:"]
        shown = {
            name: ", ".join(of or "-" for of in dims)
            for name, dims in self.parameters.items()
            if any(dims)
        }
        width = max(map(len, shown), default=0)
        lines += [f"  {name:{width}}  ({dims})" for name, dims in shown.items()]
        whole = [name for name, dims in self.parameters.items() if not any(dims)]
        lines += [f"  whole: {', '.join(whole)}"] if whole else []
        lines += [
            f"  {phase} {kind}: {calls} calls, {nbytes:,} bytes"
            for (phase, kind), (calls, nbytes) in self.nbytes.items()
        ]
        return "\n".join([*lines, *(f"  runs whole: {text}" for text in self.whole)])


def describe(sharded: Sharded, axis: str) -> Sharding:
    """The table of a sharded graph."""
    graph = sharded.graph
    parameters = {
        name: _dims(axis, sharded.cuts.get(value), graph.fakes[value].dim())
        for value, name in graph.states.items()
        if value in graph.learning
    }
    whole = []
    for step in sharded.steps:
        gathered = [one for one in step.inputs if one is not None and one.before is not None]
        if step.way is None and gathered:
            operator = step.operator
            reason = "its dimension is needed whole, or does not divide"
            reason = reason if is_known(operator) else "how to share it is not known"
            whole.append(f"{operator.node.name} ({operator.name}): {reason}")
    return Sharding(axis, sharded.ranks, parameters, tuple(_collectives(sharded)), tuple(whole))


def _dims(axis: str, cut: Cut | None, length: int) -> tuple[str | None, ...]:
    return tuple(axis if cut is not None and cut.dim == i else None for i in range(length))


def _collectives(sharded: Sharded) -> Iterator[Collective]:
    graph = sharded.graph
    seen: set[tuple[Value, Conversion]] = set()
    for step in sharded.steps:
        for value, made in zip(step.operator.inputs, step.inputs, strict=True):
            if made is not None and (value, made) not in seen:
                seen.add((value, made))
                yield from made.collectives()
        if step.way is not None and step.way.summed:
            value = step.operator.node.name, 0
            nbytes = graph.nbytes(value)
            if step.output is None:
                yield Collective("all_reduce", "forward", value, nbytes)
                continue
            yield Collective("reduce_scatter", "forward", value, nbytes)
            if value in graph.learning:
                yield Collective("all_gather", "backward", value, nbytes)
    for value in graph.results:
        if (cut := sharded.cuts.get(value)) is not None and not sharded.is_logits(value, cut):
            yield Collective("all_gather", "forward", value, graph.nbytes(value))


__all__ = ["Sharding", "describe"]
