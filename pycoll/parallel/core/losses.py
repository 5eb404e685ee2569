"""Losses as sums and counts, so that a mean over any split of a batch is exact.

Sums and counts stay tensors until a step ends: reading one waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.logits import cast, whole

Loss = Callable[[Any, Any], Any]
_IGNORED = -100  # as torch's ignore_index


def sums_and_counts(loss: Loss, dtype: torch.dtype | None = None) -> Loss:
    """Returns a loss that gives a sum and a count, and gets whole outputs where it needs them.

    Args:
        loss: The user's.
        dtype: Dtype of the outputs that it gets; None: unchanged.
    """

    def summed(output: Any, target: Any) -> tuple[Tensor, Any]:
        output = output if dtype is None else cast(output, dtype)
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


def of_whole(loss: Loss) -> Loss:
    """A loss that gets whole outputs, unless it takes parts."""
    if getattr(loss, "takes_parts", False):
        return loss
    return lambda output, target: loss(whole(output), target)


def scaled(loss: Loss, scale: float) -> Loss:
    """A loss with the same value, whose gradients are multiplied by `scale`."""
    if scale == 1.0:
        return loss

    def run(output: Any, target: Any) -> Any:
        total, count = loss(output, target)
        if total.requires_grad:
            total.register_hook(lambda gradient: gradient * scale)
        return total, count

    return run


class Metrics:
    """Adds metrics up beside the loss of each microbatch, on the ranks that compute the loss."""

    def __init__(self, metrics: Mapping[str, Loss], prepare: Callable[[Loss], Loss]) -> None:
        """Makes the sums.

        Args:
            metrics: Functions of output and targets, by name.
            prepare: Makes a loss of sums and counts of each, as for the loss itself.
        """
        self._metrics = {name: prepare(metric) for name, metric in metrics.items()}
        self._sums = torch.zeros(len(metrics), 2, dtype=torch.float64)

    def beside(self, loss: Loss) -> Loss:
        """A loss that also adds the metrics up."""
        if not self._metrics:
            return loss

        def both(output: Any, target: Any) -> Any:
            output = whole(output)  # once for all
            for i, metric in enumerate(self._metrics.values()):
                total, count = metric(output, target)
                self._sums[i] += torch.tensor([float(total), float(count)], dtype=torch.float64)
            return loss(output, target)

        return both

    def means(self, group: AxisGroup) -> dict[str, float]:
        """The means over a group of ranks of which each has other samples, or none."""
        if group.size > 1 and self._metrics:
            group.all_reduce(self._sums)
        means = self._sums[:, 0] / self._sums[:, 1].clamp(min=1)
        return dict(zip(self._metrics, means.tolist(), strict=True))


def numbers(values: Iterable[Any]) -> list[float]:
    """Numbers and scalar tensors as numbers; a device is waited for once."""
    found = list(values)
    tensors = [x.detach().double().view(()) for x in found if isinstance(x, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(x, Tensor) else float(x) for x in found]


__all__ = ["Loss", "Metrics", "numbers", "of_whole", "scaled", "sums_and_counts"]
