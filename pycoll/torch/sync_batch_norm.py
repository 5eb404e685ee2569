"""Batch normalisation over the batches of all ranks, on the CPU too; batches may differ in size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

# What ranks exchange: counts stay exact and sums of many elements precise in every model's dtype.
_EXCHANGED = torch.float64
# torch 2.13 has a new name for the same, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class SyncBatchNorm(_BatchNorm):
    """Normalises every channel over the batches of all ranks of a process group.

    As torch.nn.SyncBatchNorm, which refuses tensors of the CPU; this one takes any device that the
    group's backend moves. Ranks may bring batches of different sizes, and some of them none: result
    and gradients are those of one process with all batches concatenated. While evaluating, which
    ranks may do apart, and in a group of one rank, it is torch's own batch normalisation.

    Gradients of weight and bias are those of the own batch, as of every other layer:
    DistributedDataParallel averages them.

    Args:
        num_features: number of channels C of inputs of shape [N, C, ...].
        eps: added to the variance, no unit.
        momentum: share of the new batch in the running statistics; None: their plain average.
        affine: whether weight and bias, of shape [C], are learned.
        track_running_stats: whether running statistics are kept, and used while evaluating.
        process_group: whose ranks take part; None: all. Every one of them must come.
        device: where parameters and statistics live.
        dtype: floating type of parameters and statistics.

    Raises:
        ValueError: an input has fewer than two dimensions; while training, all batches together
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
        uses_batch = self.training or self.running_mean is None
        momentum = self._count_batch() if self.training else 0.0
        group = self.process_group or dist.group.WORLD
        alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        if not self.training or alone:
            updates = self.training and self.track_running_stats
            statistics = (self.running_mean, self.running_var)
            return functional.batch_norm(
                input,
                *(statistics if updates or not uses_batch else (None, None)),
                self.weight,
                self.bias,
                uses_batch,
                momentum,
                self.eps,
            )
        output, mean, square_sum, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, group
        )
        if self.running_mean is not None and self.running_var is not None and count > 1:
            with torch.no_grad():  # the variance of the population, as torch's
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                variance = square_sum / (count - 1)
                self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        return output

    def _count_batch(self) -> float:
        """The weight of this batch in the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> torch.nn.Module:
        """Replaces every batch normalisation within a module, torch's synchronised one included.

        Args:
            module: any module; its parameters and buffers are taken over, not copied.
            process_group: whose ranks take part; None: all.

        Returns:
            The module itself, or its replacement where it is a batch normalisation.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._taking_over(module, process_group)
        for name, child in module.named_children():
            module.register_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    convert = convert_sync_batchnorm  # torch's name is the long one

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


class _Normalise(torch.autograd.Function):
    """Result, mean, sum of squared distances from it, and count, of all ranks together."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        num_channels = input.shape[1]
        mean, square_sum, count = _combine(_gather(_statistics(input), group), num_channels)
        if count == 1:
            raise ValueError(
                "SyncBatchNorm: expected more than 1 value per channel while training, got "
                f"{tuple(input.shape)} on this rank and 1 value on all ranks together"
            )
        inverse_std = torch.rsqrt(square_sum / max(count, 1) + eps)
        work = _work_dtype(input)
        mean_w, inverse_w = mean.to(work), inverse_std.to(work)
        ctx.save_for_backward(input, weight, mean_w, inverse_w)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group, ctx.count = group, count
        output = (input.to(work) - _channels(mean_w, input)) * _channels(inverse_w, input)
        if weight is not None:
            output = output * _channels(weight.to(work), input)
        if bias is not None:
            output = output + _channels(bias.to(work), input)
        ctx.mark_non_differentiable(mean, square_sum)
        return output.to(input.dtype), mean, square_sum, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_std = ctx.saved_tensors
        work = mean.dtype
        axes = [axis for axis in range(input.dim()) if axis != 1]
        normal = (input.to(work) - _channels(mean, input)) * _channels(inverse_std, input)
        grad_w = grad.to(work)
        grad_bias = grad_w.sum(axes)
        grad_weight = (grad_w * normal).sum(axes)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([grad_bias, grad_weight]).to(_EXCHANGED)
            dist.all_reduce(sums, group=ctx.group)
            mean_grad, mean_product = (sums / max(ctx.count, 1)).to(work).chunk(2)
            scale = inverse_std if weight is None else inverse_std * weight.to(work)
            grad_input = grad_w - _channels(mean_grad, input)
            grad_input = grad_input - normal * _channels(mean_product, input)
            grad_input = (grad_input * _channels(scale, input)).to(input.dtype)
        return (
            grad_input,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _work_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _channels(x: Tensor, like: Tensor) -> Tensor:
    """Shape [C] so that it meets the channels of [N, C, ...]."""
    return x.view(1, -1, *[1] * (like.dim() - 2))


def _statistics(input: Tensor) -> Tensor:
    """Mean, sum of squared distances and count of one rank: shape [2C + 1]."""
    num_channels = input.shape[1]
    count = input.numel() // max(num_channels, 1)
    result = torch.zeros(2 * num_channels + 1, dtype=_EXCHANGED, device=input.device)
    if count > 0:
        axes = [axis for axis in range(input.dim()) if axis != 1]
        variance, mean = torch.var_mean(input.to(_work_dtype(input)), axes, correction=0)
        result[:num_channels] = mean
        result[num_channels:-1] = variance.to(_EXCHANGED) * count
        result[-1] = count
    return result


def _gather(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shape [n, 2C + 1]."""
    size = dist.get_world_size(group)
    gathered = statistics.new_empty(size * statistics.numel())
    _all_gather(gathered, statistics, group=group)
    return gathered.view(size, -1)


def _combine(gathered: Tensor, num_channels: int) -> tuple[Tensor, Tensor, int]:
    """Of all ranks together: no difference of large sums of squares, so nothing cancels."""
    means, square_sums = gathered[:, :num_channels], gathered[:, num_channels:-1]
    counts = gathered[:, -1:]
    count = int(counts.sum())
    mean = (means * counts).sum(0) / max(count, 1)
    square_sum = square_sums.sum(0) + ((means - mean).square() * counts).sum(0)
    return mean, square_sum, count
