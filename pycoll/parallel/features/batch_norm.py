"""Batch normalisation over the batches of all replicas, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pycoll.batch_norm_math import normalise
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.feature import Feature


def synchronise(model: nn.Module, replicas: AxisGroup, now: Callable[[], AxisGroup]) -> bool:
    """Makes a model's batch normalisation use the batches of all replicas, in place.

    Args:
        model: The model whose layers change.
        replicas: All ranks that may have a part of a batch; parts may be uneven or empty.
        now: Returns, at each call, the ranks that have a part.

    Returns:
        Whether the model has such layers.

    Cost: per layer, an all_gather of 2C + 1 doubles forward and an all_reduce of 2C backward.
    """
    found = False
    for module in model.modules():
        if isinstance(module, _BatchNorm) and replicas.size > 1:
            run = partial(_forward, module, now)
            module.forward = run  # type: ignore[method-assign]
            found = True
    return found


def _forward(module: _BatchNorm, now: Callable[[], AxisGroup], input: Tensor) -> Tensor:
    module._check_input_dim(input)
    group = now()
    return normalise(module, input, _Replicas(group) if group.size > 1 else None)


class SyncBatchNorm(Feature):
    """Batch normalisation over all ranks that have a part of the batch."""

    after = (ContextParallel,)

    def apply(self) -> None:
        grid, sequence = self.build.grid, self.build[ContextParallel].sequence
        replicas = grid.line_of_dp("ep", "cp")
        self.needs_barrier = synchronise(
            self.build.model,
            replicas,
            lambda: replicas if sequence.length else grid.line_of_dp("ep"),
        )

    def apply_meta(self) -> None:
        """Keeps as much for backward as torch's own layer."""


class _Replicas:
    """An AxisGroup as an Exchange."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    def gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x, [x.numel()] * self._group.size).view(-1, x.numel())

    def add(self, x: Tensor) -> None:
        self._group.all_reduce(x)


__all__ = ["SyncBatchNorm", "synchronise"]
