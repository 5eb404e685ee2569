"""Convolution as a matrix product: patches of the image times filters, on one or several ranks.

Source: Chellapilla, Puri and Simard, High Performance Convolutional Neural Networks for Document
Processing, 2006.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycoll import _core
from pycoll.errors import UsageError
from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import share


def im2col(
    x: Tensor, kernel: tuple[int, int], stride: int = 1, padding: int = 0, dilation: int = 1
) -> Tensor:
    """The matrix whose columns are the image patches under a filter.

    Args:
        x: Images, shape [N, C, H, W], of any dtype.
        kernel: Height and width of the filter.
        stride: Steps between patches.
        padding: Zeros around the image.
        dilation: Steps between a filter's elements.

    Returns:
        Shape [N, C * kernel height * kernel width, patches], as torch.nn.functional.unfold, bit
        for bit; gradients flow through it.

    Raises:
        UsageError: No patch fits into the image, or stride, padding or dilation is invalid.

    Cost: the result is written once; on the CPU by the core, on this thread.

    >>> image = torch.arange(27).view(1, 3, 3, 3)  # 3 channels of 3 x 3
    >>> im2col(image, (2, 2))[0, :4]  # of the first channel
    tensor([[0, 1, 3, 4],
            [1, 2, 4, 5],
            [3, 4, 6, 7],
            [4, 5, 7, 8]])
    >>> filters = torch.ones(2, 3, 2, 2).long()
    >>> conv2d_by_gemm(image, filters).shape
    torch.Size([1, 2, 2, 2])
    """
    return _Im2col.apply(x, tuple(kernel), stride, padding, dilation)  # type: ignore[no-any-return]


class _Im2col(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: tuple[int, int], stride: int, padding: int, dilation: int
    ) -> Tensor:
        ctx.image, ctx.options = x.shape[2:], (kernel, dilation, padding, stride)
        spans = [dilation * (k - 1) + 1 for k in kernel]
        height, width = (
            (n + 2 * padding - span) // max(stride, 1) + 1
            for n, span in zip(x.shape[2:], spans, strict=True)
        )
        if height < 1 or width < 1:
            raise UsageError(
                f"im2col: a filter of {spans[0]} x {spans[1]} does not fit into an image of "
                f"{x.shape[2]} x {x.shape[3]} with padding {padding}"
            )
        if not x.is_cpu:
            return torch.nn.functional.unfold(x, kernel, dilation, padding, stride)
        out = x.new_empty(x.shape[0], x.shape[1] * kernel[0] * kernel[1], height * width)
        pairs = ((stride,) * 2, (padding,) * 2, (dilation,) * 2)
        _core._im2col(out, x.detach().contiguous(), kernel, *pairs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return torch.nn.functional.fold(grad, ctx.image, *ctx.options), None, None, None, None


def conv2d_by_gemm(
    x: Tensor, weight: Tensor, group: AxisGroup | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """A convolution as one product of the matrices of filters and of patches.

    Args:
        x: Images, shape [N, C, H, W], the same on all ranks.
        weight: Filters, shape [F, C, kh, kw], the same on all ranks.
        group: Ranks that share out the filters; None: this rank multiplies all of them.
        stride: Steps between patches.
        padding: Zeros around the image.

    Returns:
        Shape [N, F, H', W'], the same on all ranks, as torch.nn.functional.conv2d.
    """
    num_filters, _, *kernel = weight.shape
    filters = weight.flatten(1)
    if group is not None:
        start, stop = share(num_filters, group.size, group.rank)
        filters = filters[start:stop]
        x = collectives.copy_to(x, group)
    y = filters @ im2col(x, (kernel[0], kernel[1]), stride, padding)
    if group is not None:
        y = collectives.gather_from(y, group, 1, num_filters)
    rows = (x.shape[2] + 2 * padding - kernel[0]) // stride + 1
    return y.unflatten(2, (rows, -1))


__all__ = ["conv2d_by_gemm", "im2col"]
