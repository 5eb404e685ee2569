"""What tensor parallelism has made of a model, and how activations enter and leave its layers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pycoll.parallel.core import collectives, deferred
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Placement, share


@dataclass(slots=True)
class Shared:
    """The result of tensor parallelism on a model.

    Attributes:
        group: The ranks that share each tensor.
        sequence: Whether the activations between layers are shared out along the sequence.
        placements: Placements of the parameters that are parts, by the parameter's id.
        partial: Ids of parameters that every rank holds whole, with partial sums as gradients.
        inside: The shared dimension of layers whose input is a part, by name.
        whole_heads: Names of modules with shared layers, but with all heads on every rank.
    """

    group: AxisGroup
    sequence: bool
    placements: dict[int, Placement] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)
    inside: dict[str, int] = field(default_factory=dict)
    whole_heads: set[str] = field(default_factory=set)
    _entered: tuple[Any, Any] | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The whole input of layers that return parts; layers with the same input share it."""
        last = self._entered
        if last is not None and (whole := last[1]()) is not None and (last[0]() is x or whole is x):
            return whole  # type: ignore[no-any-return]
        if self.sequence:
            whole = collectives.gather_to(x, self.group, 1, x.shape[1] * self.group.size)
        else:
            whole = collectives.copy_to(x, self.group)
        self._entered = (weakref.ref(x), weakref.ref(whole))
        return whole

    def leave(self, x: Tensor) -> Tensor:
        """The sum of partial results: whole, or this rank's share of the sequence."""
        if self.sequence:
            return collectives.reduce_scatter_from(x, self.group, 1)
        return collectives.reduce_from(x, self.group)

    def shorten(self, parameter: Tensor, dim: int, parts: int = 1, unit: int = 1) -> None:
        """Keeps this rank's part of a parameter; a tied parameter is shortened once."""
        if id(parameter) in self.placements:
            return
        placement = part_of(tuple(parameter.shape), dim, parts, unit, self.group)
        deferred.shorten(parameter, placement)
        self.placements[id(parameter)] = placement


def part_of(shape: tuple[int, ...], dim: int, parts: int, unit: int, group: AxisGroup) -> Placement:
    block = shape[dim] // parts
    start, stop = share(block // unit, group.size, group.rank)
    ranges = ((i * block + start * unit, i * block + stop * unit) for i in range(parts))
    return Placement(shape, dim, tuple(ranges))


__all__ = ["Shared"]
