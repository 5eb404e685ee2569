"""Whole tensors, for optimizers whose steps need them where a rank has only pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, optim

Found = list[tuple[int, Tensor, Tensor]]  # number of the group, parameter, a value for its elements


class Tensors(Protocol):
    """What whole tensors an optimizer sees. Each method but `spread` and `cut` is collective."""

    def shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the whole tensor."""

    def spread(self, parameter: Tensor, values: Tensor) -> Tensor:
        """The values of a piece at their places in the whole tensor, with zeros elsewhere.

        Values that another rank has, too, are on one of these ranks only.
        """

    def cut(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """The values of a piece, from the whole tensor."""

    def sums(self, parameters: list[Tensor], rows: Tensor) -> Tensor:
        """Adds up several sums over elements: a row of float64 for each parameter."""

    def add_up(self, parameters: list[Tensor], vectors: list[Tensor]) -> list[Tensor]:
        """Adds up a vector for each matrix, as long as its rows and its columns together."""

    def on_whole(
        self, groups: Collection[int], found: Found, function: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """Calls a function of whole tensors, each on one rank, and returns the pieces of results.

        Args:
            groups: The groups whose parameters take part, identical on all ranks.
            found: This rank's pieces.
            function: Called with the number of the group and a whole tensor; keeps the shape.
        """


class OneProcess:
    """All tensors are whole."""

    def shape(self, parameter: Tensor) -> torch.Size:
        """See Tensors."""
        return parameter.shape

    def spread(self, parameter: Tensor, values: Tensor) -> Tensor:
        """See Tensors."""
        return values

    def cut(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """See Tensors."""
        return whole

    def sums(self, parameters: list[Tensor], rows: Tensor) -> Tensor:
        """See Tensors."""
        return rows

    def add_up(self, parameters: list[Tensor], vectors: list[Tensor]) -> list[Tensor]:
        """See Tensors."""
        return vectors

    def on_whole(
        self, groups: Collection[int], found: Found, function: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """See Tensors."""
        return [function(group, value) for group, _, value in found]


class OfWholeTensors(optim.Optimizer, ABC):
    """An optimizer whose steps depend on whole tensors.

    Attributes:
        tensors: The whole tensors; `pc.optimizer` sets it where ranks have pieces.
    """

    tensors: Tensors = OneProcess()

    def found(self) -> Found:
        """The parameters that have gradients."""
        return [
            (i, parameter, parameter.grad)
            for i, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps the parameters that have gradients.

        Args:
            closure: Called first, with gradients enabled; computes them.

        Returns:
            What `closure` returned.

        Cost: that of the class.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.update(self.found())
        return result

    @abstractmethod
    def update(self, found: Found) -> None:
        """Steps parameters by their gradients. Collective where ranks have pieces."""


def square(x: Tensor) -> Tensor:
    """The square of the 2-norm, in float64."""
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64) ** 2


__all__ = ["Found", "OfWholeTensors", "OneProcess", "Tensors", "square"]
