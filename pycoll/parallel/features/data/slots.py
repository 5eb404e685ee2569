"""The place of a parameter in its bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Slot:
    """A parameter's place in its bucket.

    Attributes:
        name: Full name of the parameter.
        parameter: The parameter.
        offset: Offset of its first element in the flat array.
        shape: Shape of the parameter.
        ready: Whether this backward pass has computed its gradient.
        filled: Whether the bucket has its gradient.
    """

    name: str
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    ready: bool = False
    filled: bool = False

    @property
    def count(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat array."""
        return flat[self.offset : self.offset + self.count].view(self.shape)


__all__ = ["Slot"]
