"""Batch normalisation over the batches of several ranks, for torch's and pycoll's trainers.

An Exchange communicates between the ranks: a process group of torch, or an axis group of a mesh.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

# The dtype of exchanged values: counts stay exact and long sums precise in every model's dtype.
_EXCHANGED = torch.float64


class Exchange(Protocol):
    """The ranks whose batches are normalised as one batch."""

    def gather(self, x: Tensor) -> Tensor:
        """Gathers the flat arrays of all ranks, shape [n, count]."""

    def add(self, x: Tensor) -> None:
        """Adds up an array over all ranks, in place."""


def normalise(module: _BatchNorm, input: Tensor, exchange: Exchange | None) -> Tensor:
    """Forward pass of a batch normalisation over the batches of all ranks.

    Args:
        module: Supplies the parameters, statistics and options.
        input: Shape [N, C, ...], floating; N may be 0, and differ between ranks.
        exchange: The ranks; None: this rank alone. Not used during evaluation.

    Returns:
        The result, of the input's shape.

    Raises:
        ValueError: in training, all batches together have one value per channel.

    Cost: an all_gather of 2C + 1 doubles forward and an all_reduce of 2C doubles backward.
    """
    uses_batch = module.training or module.running_mean is None
    momentum = _count_batch(module) if module.training else 0.0
    if not module.training or exchange is None:
        updates = module.training and module.track_running_stats
        statistics = (module.running_mean, module.running_var)
        return functional.batch_norm(
            input,
            *(statistics if updates or not uses_batch else (None, None)),
            module.weight,
            module.bias,
            uses_batch,
            momentum,
            module.eps,
        )
    output, mean, square_sum, count = _Normalise.apply(
        input, module.weight, module.bias, module.eps, exchange
    )
    if module.running_mean is not None and module.running_var is not None and count > 1:
        with torch.no_grad():  # the variance of the population, as in torch
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
            variance = square_sum / (count - 1)
            module.running_var.lerp_(variance.to(module.running_var.dtype), momentum)
    result: Tensor = output
    return result


def _count_batch(module: _BatchNorm) -> float:
    """The weight of this batch in the running statistics."""
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1.0 / float(module.num_batches_tracked)
    return module.momentum or 0.0


class _Normalise(torch.autograd.Function):
    """Result, mean, sum of squared distances from it, and count, of all ranks together."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        num_channels = input.shape[1]
        mean, square_sum, count = _combine(exchange.gather(_statistics(input)), num_channels)
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
        ctx.exchange, ctx.count = exchange, count
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
            ctx.exchange.add(sums)
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
    """Reshapes [C] so that it broadcasts to the channels of [N, C, ...]."""
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


def _combine(gathered: Tensor, num_channels: int) -> tuple[Tensor, Tensor, int]:
    """Mean, squared distances and count of all ranks, computed without cancellation."""
    means, square_sums = gathered[:, :num_channels], gathered[:, num_channels:-1]
    counts = gathered[:, -1:]
    count = int(counts.sum())
    mean = (means * counts).sum(0) / max(count, 1)
    square_sum = square_sums.sum(0) + ((means - mean).square() * counts).sum(0)
    return mean, square_sum, count


__all__ = ["Exchange", "normalise"]
