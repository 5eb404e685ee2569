"""Dropout by place: an element's mask depends on seed, step, layer and its place in the batch.

So one process and every mesh drop the same elements, and recomputing a layer drops them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Part, Ranges, share
from pycoll.parallel.core.random import keep_mask

if TYPE_CHECKING:
    from pycoll.parallel.context.sequence import Sequence

_RUN = 1024  # elements in a row from which on a part's words are drawn without the rest


@dataclass(frozen=True, slots=True)
class Position:
    """Which samples of which step pass through the model.

    Attributes:
        step: Number of the step.
        first_sample: Place of the microbatch's first sample in the batch of all replicas.
        num_samples: Of the microbatch.
        sequence: Length of the sequence of which this rank's share passes; 0: it passes whole.
    """

    step: int = 0
    first_sample: int = 0
    num_samples: int = 1
    sequence: int = 0


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
    model: nn.Module,
    positions: Positions,
    inside: dict[str, int],
    line: AxisGroup,
    sequence: Sequence,
) -> None:
    """Makes the nn.Dropout layers of a model draw masks by place, in place.

    Args:
        model: Whose layers.
        positions: Where they look.
        inside: The dimension along which a layer's input is shared out over `line`, by name.
        line: The ranks of a tensor.
        sequence: Of which a layer's input may be a share.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            whole = Whole(inside.get(name), line, sequence)
            # Functions of the instance win over those of the class: type and names stay.
            module.forward = partial(  # type: ignore[method-assign]
                _drop, module, name, positions, whole
            )


class Whole:
    """The place of a part of an input in the whole of all ranks that share it."""

    def __init__(self, dim: int | None, line: AxisGroup, sequence: Sequence) -> None:
        self._dim, self._line, self._sequence = dim, line, sequence
        self._sizes: dict[int, int] = {}  # of the whole, by that of the part: asked once

    def part(self, shape: tuple[int, ...], num_samples: int) -> Part:
        """Where a tensor lies that has `shape` here; of tokens in a row, by sample and place."""
        dim = None if self._dim is None else self._dim % len(shape)
        length, size = self._sequence.length, self._sequence.line.size
        if length and len(shape) < 3 and shape[0] * size == num_samples * length:
            shape = (num_samples, length // size, *shape[1:])
            dim = None if dim is None else dim + 1
        part = Part(shape)
        if (found := self._sequence.found_in(shape)) is not None:
            part = _along(part, found[0], length, found[1])
        if dim is not None and dim not in part.ranges:
            line = self._line
            if shape[dim] not in self._sizes:
                self._sizes[shape[dim]] = int(line.all_reduce(torch.tensor([shape[dim]])))
            total = self._sizes[shape[dim]]
            part = _along(part, dim, total, (share(total, line.size, line.rank),))
        return part


def _along(part: Part, dim: int, size: int, ranges: Ranges) -> Part:
    shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
    return Part(shape, {**part.ranges, dim: ranges})


def _drop(module: nn.Dropout, name: str, positions: Positions, whole: Whole, x: Tensor) -> Tensor:
    return drop(x, module.p, name, positions, whole) if module.training else x


def drop(x: Tensor, p: float, name: str, positions: Positions, whole: Whole) -> Tensor:
    """Drops elements of the part of the batch that `x` is; its first dimension counts samples.

    Args:
        x: Floating.
        p: Of an element to be dropped.
        name: Of the layer.
        positions: Where the batch is.
        whole: Where `x` lies in the whole of all ranks that share it.
    """
    kept = keeps(whole.part(tuple(x.shape), positions.now.num_samples), p, name, positions)
    return x * kept.view(x.shape).to(x.dtype) / (1.0 - p) if p < 1 else x * 0.0


def keeps(part: Part, p: float, name: str, positions: Positions) -> Tensor:
    """Which elements of a part of the batch a layer keeps: bools, True with probability 1 - p."""
    now = positions.now
    stream = f"{positions.seed}/{now.step}/{name}"
    rows_of_sample = part.shape[0] // max(now.num_samples, 1)
    row = math.prod(part.shape[1:])
    first = now.first_sample * rows_of_sample * row
    for dim in sorted(part.ranges):
        size, inner = part.shape[dim], math.prod(part.shape[dim + 1 :])
        if not part.shape[0] or min(b - a for a, b in part.ranges[dim]) * inner < _RUN:
            continue
        runs = [
            keep_mask(stream, first + (outer * size + start) * inner, (stop - start) * inner, p)
            for outer in range(math.prod(part.shape[:dim]))
            for start, stop in part.ranges[dim]
        ]
        others = {other: ranges for other, ranges in part.ranges.items() if other != dim}
        shape = (*part.shape[:dim], -1, *part.shape[dim + 1 :])
        return Part(part.shape, others).take(torch.cat(runs).view(shape))
    return part.take(keep_mask(stream, first, part.shape[0] * row, p).view(part.shape))


__all__ = ["Position", "Positions", "Whole", "drop", "keeps", "key_dropouts"]
