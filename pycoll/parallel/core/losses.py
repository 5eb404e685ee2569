"""Losses as sums and counts, so that a mean over any split of a batch is exact.

Sums and counts stay tensors until a step ends: reading one waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core.logits import whole

Loss = Callable[[Any, Any], Any]
_IGNORED = -100  # as torch's ignore_index


def sums_and_counts(loss: Loss) -> Loss:
    """Returns a loss that gives a sum and a count, and gets whole outputs where it needs them."""

    def summed(output: Any, target: Any) -> tuple[Tensor, Any]:
        if not getattr(loss, "takes_parts", False):
            output = whole(output)
        result = loss(output, target)
        if isinstance(result, tuple):
            return result
        if isinstance(target, Tensor) and not target.is_floating_point():
            count = (target != _IGNORED).sum()
            # The mean over zero targets is NaN.
            return torch.where(count > 0, result * count, result.nan_to_num() * 0), count
        number = target.numel() if isinstance(target, Tensor) else len(target)
        return (result * number if number else result.nan_to_num() * 0), number

    return summed


def numbers(values: Iterable[Any]) -> list[float]:
    """Numbers and scalar tensors as numbers; a device is waited for once."""
    found = list(values)
    tensors = [x.detach().double().view(()) for x in found if isinstance(x, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(x, Tensor) else float(x) for x in found]


__all__ = ["Loss", "numbers", "sums_and_counts"]
