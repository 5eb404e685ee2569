"""Dropout by place: an element's mask depends on seed, step, layer and its place in the batch.

So one process and every mesh drop the same elements, and recomputing a layer drops them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from pycoll.parallel.ledger import Line
from pycoll.parallel.placement import Placement, share
from pycoll.parallel.random import keep_mask


@dataclass(frozen=True, slots=True)
class Position:
    """Which samples of which step pass through the model.

    Attributes:
        step: Number of the step.
        first_sample: Place of the microbatch's first sample in the batch of all replicas.
        num_samples: Of the microbatch.
    """

    step: int = 0
    first_sample: int = 0
    num_samples: int = 1


class Positions:
    """The position that dropout layers look up.

    Attributes:
        seed: Of all masks.
        now: The current position.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.now = Position()

    def move(self, **changes: int) -> None:
        """Changes fields of the current position."""
        self.now = replace(self.now, **changes)

    @contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """Another position for a while: that of a forward pass that is run again."""
        self.now, before = position, self.now
        try:
            yield
        finally:
            self.now = before


def key_dropouts(
    model: nn.Module, positions: Positions, inside: dict[str, int], line: Line
) -> None:
    """Makes the nn.Dropout layers of a model draw masks by place, in place.

    Args:
        model: Whose layers.
        positions: Where they look.
        inside: The dimension along which a layer's input is shared out over `line`, by name.
        line: The ranks of a tensor.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            whole = WholeSize(inside.get(name), line)
            # Functions of the instance win over those of the class: type and names stay.
            module.forward = partial(  # type: ignore[method-assign]
                _drop, module, name, positions, whole
            )


class WholeSize:
    """The place of a part of an input in the whole of all ranks of a line."""

    def __init__(self, dim: int | None, line: Line) -> None:
        self._dim, self._line = dim, line
        self._sizes: dict[int, int] = {}  # of the whole, by that of the part: asked once

    def placement(self, shape: tuple[int, ...]) -> Placement:
        if self._dim is None:
            return Placement(shape)
        dim, line = self._dim % len(shape), self._line
        if shape[dim] not in self._sizes:
            total = line.all_reduce(torch.tensor([shape[dim]]))
            self._sizes[shape[dim]] = int(total)
        whole = self._sizes[shape[dim]]
        return Placement(
            (*shape[:dim], whole, *shape[dim + 1 :]), dim, (share(whole, line.size, line.rank),)
        )


def _drop(
    module: nn.Dropout, name: str, positions: Positions, whole: WholeSize, x: Tensor
) -> Tensor:
    return drop(x, module.p, name, positions, whole) if module.training else x


def drop(x: Tensor, p: float, name: str, positions: Positions, whole: WholeSize) -> Tensor:
    """Drops elements of the part of the batch that `x` is; its first dimension counts samples.

    Args:
        x: Floating.
        p: Of an element to be dropped.
        name: Of the layer.
        positions: Where the batch is.
        whole: Where `x` lies in the whole of all ranks that share it.
    """
    now = positions.now
    placement = whole.placement(tuple(x.shape))
    rows_of_sample = x.shape[0] // max(now.num_samples, 1)
    row = math.prod(placement.shape[1:])
    mask = keep_mask(
        f"{positions.seed}/{now.step}/{name}",
        now.first_sample * rows_of_sample * row,
        x.shape[0] * row,
        p,
    )
    kept = placement.take(mask.view(placement.shape))
    return x * kept.to(x.dtype) / (1.0 - p) if p < 1 else x * 0.0


__all__ = ["Position", "Positions", "WholeSize", "drop", "key_dropouts"]
