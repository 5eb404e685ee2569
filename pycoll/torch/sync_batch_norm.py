"""Batch normalisation over the batches of all ranks, on the CPU too; batches may differ in size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pycoll.batch_norm_math import normalise

# torch 2.13 renamed this function, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class SyncBatchNorm(_BatchNorm):
    """Normalises every channel over the batches of all ranks of a process group.

    Like torch.nn.SyncBatchNorm, which refuses CPU tensors; this class supports every device of the
    group's backend. Batch sizes may differ between ranks, and may be 0: result and gradients are
    those of one process with all batches concatenated. In evaluation, which is not collective, and
    in a group of one rank, it is torch's own batch normalisation.

    The gradients of weight and bias are those of the rank's own batch, as in every other layer:
    DistributedDataParallel averages them.

    Args:
        num_features: number of channels C of inputs of shape [N, C, ...].
        eps: added to the variance.
        momentum: share of the new batch in the running statistics; None: their plain average.
        affine: whether weight and bias, of shape [C], are learned.
        track_running_stats: whether running statistics are kept, and used in evaluation.
        process_group: process group, all of whose ranks must call forward; None: the default.
        device: device of parameters and statistics.
        dtype: floating type of parameters and statistics.

    Raises:
        ValueError: an input has fewer than two dimensions; or, in training, all batches together
            have one value per channel.

    Cost: an all_gather of 2C + 1 doubles forward and an all_reduce of 2C doubles backward.
    Source: Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167; the combination of batches is
        Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm, 1979.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected [N, C, ...], got {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        """Input and result of shape [N, C, ...], floating; N may be 0, and differ between ranks."""
        self._check_input_dim(input)
        group = self.process_group or dist.group.WORLD
        alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        return normalise(self, input, None if alone else _Group(group))

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> torch.nn.Module:
        """Replaces every batch normalisation within a module, torch's synchronised one included.

        Args:
            module: any module; its parameters and buffers are reused, not copied.
            process_group: process group; None: the default group.

        Returns:
            The module itself, or its replacement if it is a batch normalisation.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._taking_over(module, process_group)
        for name, child in module.named_children():
            module.register_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    convert = convert_sync_batchnorm  # short name; torch has the long one

    @classmethod
    def _taking_over(
        cls, module: _BatchNorm, process_group: dist.ProcessGroup | None
    ) -> SyncBatchNorm:
        new = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
        )
        for name, parameter in module.named_parameters(recurse=False):
            new.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            new.register_buffer(name, buffer)
        new.train(module.training)
        return new


class _Group:
    """The ranks of a process group, as an Exchange."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(dist.get_world_size(self._group) * x.numel())
        _all_gather(gathered, x, group=self._group)
        return gathered.view(-1, x.numel())

    def add(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self._group)
