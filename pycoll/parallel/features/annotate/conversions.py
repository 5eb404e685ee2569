"""Conversions of a tensor from the cut that it has to the one that an operator needs.

Each is a function of `core.collectives` with its conjugate in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.annotate.cuts import Cut
from pycoll.parallel.features.annotate.graph import Graph, Value


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the sharded graph.

    Attributes:
        kind: Its name, such as "all_reduce".
        phase: "forward" or "backward".
        value: The tensor.
        nbytes: Payload: bytes of the whole tensor.
    """

    kind: str
    phase: str
    value: Value
    nbytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is done to an argument of an operator.

    Attributes:
        kind: A key of the table of kinds.
        value: The tensor.
        before: Its cut; None: it is whole.
        after: The cut that the operator needs; None: a whole tensor.
        nbytes: Bytes of the whole tensor.
        learns: Whether a gradient flows back.
    """

    kind: str
    value: Value
    before: Cut | None
    after: Cut | None
    nbytes: int
    learns: bool

    def collectives(self) -> Iterator[Collective]:
        """What it sends, forward and backward."""
        _, forward, backward = _KINDS[self.kind]
        if forward:
            yield Collective(forward, "forward", self.value, self.nbytes)
        if backward and self.learns:
            yield Collective(backward, "backward", self.value, self.nbytes)

    def apply(self, x: Tensor, group: AxisGroup) -> Tensor:
        """Converts a rank's tensor."""
        return _KINDS[self.kind][0](x, group, self.before, self.after)


def conversion(
    graph: Graph, value: Value, before: Cut | None, after: Cut | None, *, shared: bool
) -> Conversion | None:
    """The conversion of an argument; `shared`: the ranks do different work with it."""
    if before == after is not None:
        return None
    learns = value in graph.learning
    if before is None and after is None:
        if not (shared and learns):
            return None
        kind = "copy"
    elif before is None:
        kind = "scatter"
    elif after is not None:
        kind = "move"
    else:
        kind = "gather_for_parts" if shared else "gather"
    return Conversion(kind, value, before, after, graph.nbytes(value), learns)


def on_blocks(cut: Cut, x: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Calls a function with a dimension that is shared out evenly, for each block of a cut."""
    if cut.blocks == 1:
        return function(x, cut.dim)
    apart = x.unflatten(cut.dim, (cut.blocks, -1))
    return function(apart, cut.dim + 1).flatten(cut.dim, cut.dim + 1)


def _copy(x: Tensor, group: AxisGroup, before: Cut | None, after: Cut | None) -> Tensor:
    return collectives.copy_to(x, group)


def _scatter(x: Tensor, group: AxisGroup, before: Cut | None, after: Cut | None) -> Tensor:
    assert after is not None
    return on_blocks(after, x, lambda x, dim: collectives.scatter_to(x, group, dim))


def gather(x: Tensor, group: AxisGroup, before: Cut | None, after: Cut | None = None) -> Tensor:
    """Gathers a part into a whole tensor, with which all ranks do the same."""
    assert before is not None
    return on_blocks(
        before,
        x,
        lambda x, dim: collectives.gather_from(x, group, dim, x.shape[dim] * group.size),
    )


def _gather_for_parts(x: Tensor, group: AxisGroup, before: Cut | None, after: Cut | None) -> Tensor:
    assert before is not None
    return on_blocks(
        before, x, lambda x, dim: collectives.gather_to(x, group, dim, x.shape[dim] * group.size)
    )


def _move(x: Tensor, group: AxisGroup, before: Cut | None, after: Cut | None) -> Tensor:
    return _scatter(gather(x, group, before), group, None, after)


# By kind: the function, and what it sends forward and backward.
_KINDS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "copy": (_copy, "", "all_reduce"),
    "scatter": (_scatter, "", "all_gather"),
    "gather": (gather, "all_gather", ""),
    "gather_for_parts": (_gather_for_parts, "all_gather", "reduce_scatter"),
    "move": (_move, "all_gather", "all_gather"),
}

__all__ = ["Collective", "Conversion", "conversion", "gather"]
