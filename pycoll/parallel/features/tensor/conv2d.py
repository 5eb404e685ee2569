"""One convolution on several ranks: by channels of output, by channels of input, or by space."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pycoll.errors import UsageError
from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.transfers import Link
from pycoll.parallel.features.tensor.plan import Conv
from pycoll.parallel.features.tensor.shared import Shared


def share_conv(shared: Shared, where: str, layer: nn.Module, style: Conv) -> None:
    """Shares a Conv2d out, in place.

    Raises:
        UsageError: The layer is no Conv2d that can be shared out in this style.
    """
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros" or layer.groups != 1:
        raise UsageError(f"{where}: expected a Conv2d in one group, padded with zeros")
    if isinstance(layer.padding, str):
        raise UsageError(f"{where}: its padding is {layer.padding!r}, expected numbers")
    if style.by == "out":
        size = layer.out_channels
        shared.shorten(layer.weight, 0)
        if layer.bias is not None:
            shared.shorten(layer.bias, 0)
        run: Any = partial(_by_out, shared.group, layer, size)
    elif style.by == "in":
        shared.shorten(layer.weight, 1)
        run = partial(_by_in, shared.group, layer)
    elif style.by == "space":
        if layer.stride[0] != 1 or layer.dilation != (1, 1) or layer.kernel_size[0] % 2 == 0:
            raise UsageError(f"{where}: sharing rows needs stride 1 and odd kernels")
        if layer.padding[0] != layer.kernel_size[0] // 2:
            raise UsageError(f"{where}: sharing rows needs as many rows out as in")
        shared.partial.update(id(parameter) for parameter in layer.parameters())
        run = partial(_by_space, shared.group, layer)
    else:
        raise UsageError(f"{where}: by {style.by!r}, expected 'out', 'in' or 'space'")
    layer.forward = run  # type: ignore[method-assign]


def _convolve(layer: nn.Conv2d, x: Tensor, padding: Any = None, bias: Any = None) -> Tensor:
    padding = layer.padding if padding is None else padding
    return functional.conv2d(x, layer.weight, bias, layer.stride, padding, layer.dilation)


def _by_out(group: AxisGroup, layer: nn.Conv2d, size: int, x: Tensor) -> Tensor:
    y = _convolve(layer, collectives.copy_to(x, group), bias=layer.bias)
    return collectives.gather_from(y, group, 1, size)


def _by_in(group: AxisGroup, layer: nn.Conv2d, x: Tensor) -> Tensor:
    y = collectives.reduce_from(_convolve(layer, collectives.scatter_to(x, group, 1)), group)
    return y if layer.bias is None else y + layer.bias.view(-1, 1, 1)


def _by_space(group: AxisGroup, layer: nn.Conv2d, x: Tensor) -> Tensor:
    width = layer.kernel_size[0] // 2
    return _convolve(
        layer, with_halo(x, group, width), padding=(0, layer.padding[1]), bias=layer.bias
    )


def with_halo(x: Tensor, group: AxisGroup, width: int) -> Tensor:
    """Extends an image's rows by `width` rows of each neighbour; zeros at the image's edges.

    Args:
        x: Shape [N, C, rows, W]: this rank's rows, at least `width`.
        group: The ranks, from the top of the image to its bottom.
        width: Number of rows from each side.

    Returns:
        Shape [N, C, rows + 2 * width, W].

    Cost: a message of N * C * width * W elements to each neighbour, forward and backward.
    """
    return _Halo.apply(x, group, width)  # type: ignore[no-any-return]


def _exchange(group: AxisGroup, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Sends `up` to the rank above and `down` to the one below; returns what they sent."""
    above, below = down.new_zeros(down.shape), up.new_zeros(up.shape)
    rank, neighbours = group.rank, range(group.size - 1)
    downward = [Link(upper, upper + 1, "down") for upper in neighbours]
    upward = [Link(upper + 1, upper, "up") for upper in neighbours]
    going: dict[Link, Tensor] = {}
    coming: dict[Link, Tensor] = {}
    if rank > 0:
        going[upward[rank - 1]], coming[downward[rank - 1]] = up.contiguous(), above
    if rank + 1 < group.size:
        going[downward[rank]], coming[upward[rank]] = down.contiguous(), below
    for work in group.exchange([*downward, *upward], going, coming):
        work.wait()
    return above, below


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, width: int) -> Tensor:
        if x.shape[2] < width:
            raise UsageError(f"conv2d by space: {x.shape[2]} rows, expected {width} or more")
        ctx.group, ctx.width = group, width
        last = x.shape[2] - width
        above, below = _exchange(group, x[:, :, :width], x[:, :, last:])
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        width, rows = ctx.width, grad.shape[2] - 2 * ctx.width
        above, below = _exchange(ctx.group, grad[:, :, :width], grad[:, :, width + rows :])
        result = grad[:, :, width : width + rows].clone()
        result[:, :, :width] += above
        result[:, :, rows - width :] += below
        return result, None, None


__all__ = ["share_conv", "with_halo"]
