"""Batch normalisation on a mesh: its batch is that of all replicas, as on one process."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pycoll.batch_norm import normalise
from pycoll.parallel.ledger import Line


def synchronise(model: nn.Module, line: Line) -> bool:
    """Makes the batch normalisations of a model see the batches of all replicas, in place.

    Args:
        model: Whose layers.
        line: The replicas; batches may be uneven, and some of them empty.

    Returns:
        Whether there are any that do.

    Cost: of each, an all_gather of 2C + 1 doubles forward and an all_reduce of 2C backward.
    """
    found = False
    for module in model.modules():
        if isinstance(module, _BatchNorm) and line.size > 1:
            run = partial(_forward, module, _Replicas(line))
            module.forward = run  # type: ignore[method-assign]
            found = True
    return found


def _forward(module: _BatchNorm, replicas: _Replicas, input: Tensor) -> Tensor:
    module._check_input_dim(input)
    return normalise(module, input, replicas)


class _Replicas:
    """A line of a mesh, as an Exchange."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def gather(self, x: Tensor) -> Tensor:
        return self._line.all_gather(x, [x.numel()] * self._line.size).view(-1, x.numel())

    def add(self, x: Tensor) -> None:
        self._line.all_reduce(x)


__all__ = ["synchronise"]
