"""Dropout by place: a mask depends on seed, step, layer and the element's place in the batch.

One process and every mesh drop the same elements, and recomputing a layer drops them again.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Part, Ranges, share
from pycoll.parallel.core.positions import Position, Positions
from pycoll.parallel.core.random import keep_mask
from pycoll.parallel.features.context.sequence import Sequence

_RUN = 1024  # shortest run of elements whose words are drawn separately


def key_dropouts(
    model: nn.Module,
    positions: Positions,
    inside: dict[str, int],
    group: AxisGroup,
    sequence: Sequence,
) -> None:
    """Makes the nn.Dropout layers of a model draw masks by place, in place.

    Args:
        model: The model whose layers change.
        positions: The positions that the layers look up.
        inside: The dimension along which a layer's input is shared out over `group`, by name.
        group: The ranks that share each tensor.
        sequence: The sequence of which a layer's input may be a share.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            whole = Whole(inside.get(name), group, sequence)
            # A function of the instance takes precedence over the class's: type and names stay.
            module.forward = partial(  # type: ignore[method-assign]
                _drop, module, name, positions, whole
            )


class Whole:
    """Places a part of an input in the whole input of all ranks that share it."""

    def __init__(self, dim: int | None, group: AxisGroup, sequence: Sequence) -> None:
        self._dim, self._group, self._sequence = dim, group, sequence
        self._sizes: dict[int, int] = {}  # whole size by size of the part

    def part(self, shape: tuple[int, ...], num_samples: int) -> Part:
        """Place of a tensor of local `shape`; flat tokens count by sample and place."""
        dim = None if self._dim is None else self._dim % len(shape)
        length, size = self._sequence.length, self._sequence.group.size
        if length and len(shape) < 3 and shape[0] * size == num_samples * length:
            shape = (num_samples, length // size, *shape[1:])
            dim = None if dim is None else dim + 1
        part = Part(shape)
        if (found := self._sequence.found_in(shape)) is not None:
            part = _along(part, found[0], length, found[1])
        if dim is not None and dim not in part.ranges:
            group = self._group
            if shape[dim] not in self._sizes:
                self._sizes[shape[dim]] = int(group.all_reduce(torch.tensor([shape[dim]])))
            total = self._sizes[shape[dim]]
            part = _along(part, dim, total, (share(total, group.size, group.rank),))
        return part


def _along(part: Part, dim: int, size: int, ranges: Ranges) -> Part:
    shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
    return Part(shape, {**part.ranges, dim: ranges})


def _drop(module: nn.Dropout, name: str, positions: Positions, whole: Whole, x: Tensor) -> Tensor:
    return drop(x, module.p, name, positions, whole) if module.training else x


def drop(x: Tensor, p: float, name: str, positions: Positions, whole: Whole) -> Tensor:
    """Drops elements of `x`, a part of the batch whose first dimension counts samples.

    Args:
        x: A floating tensor.
        p: Probability that an element is dropped.
        name: Name of the layer.
        positions: The current position in the batch.
        whole: Places `x` in the whole input of all ranks that share it.
    """
    part = whole.part(tuple(x.shape), positions.now.num_samples)
    kept = keeps(part, p, name, positions, x.device)
    return x * kept.view(x.shape).to(x.dtype) / (1.0 - p) if p < 1 else x * 0.0


def keeps(part: Part, p: float, name: str, positions: Positions, device: torch.device) -> Tensor:
    """Mask of the elements that a layer keeps: bools, True with probability 1 - p."""
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
            keep_mask(
                stream, first + (outer * size + start) * inner, (stop - start) * inner, p, device
            )
            for outer in range(math.prod(part.shape[:dim]))
            for start, stop in part.ranges[dim]
        ]
        others = {other: ranges for other, ranges in part.ranges.items() if other != dim}
        shape = (*part.shape[:dim], -1, *part.shape[dim + 1 :])
        return Part(part.shape, others).take(torch.cat(runs).view(shape))
    return part.take(keep_mask(stream, first, part.shape[0] * row, p, device).view(part.shape))


__all__ = ["Position", "Positions", "Whole", "drop", "keeps", "key_dropouts"]
