"""Losses as sums and counts, so that a mean over any split of a batch is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pycoll.parallel.core.logits import whole

Loss = Callable[[Any, Any], Any]
_IGNORED = -100  # as torch's ignore_index


def sums_and_counts(loss: Loss) -> Loss:
    """Returns a loss that gives a sum and a count, and gets whole outputs where it needs them."""

    def summed(output: Any, target: Any) -> tuple[Tensor, int]:
        if not getattr(loss, "takes_parts", False):
            output = whole(output)
        result = loss(output, target)
        if isinstance(result, tuple):
            return result[0], int(result[1])
        count = len(target) if not isinstance(target, Tensor) else target.numel()
        if isinstance(target, Tensor) and not target.is_floating_point():
            count = int((target != _IGNORED).sum())
        # The mean over zero targets is NaN.
        return (result * count if count else result.nan_to_num() * 0), count

    return summed


__all__ = ["Loss", "sums_and_counts"]
