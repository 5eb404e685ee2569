"""Convolution as a product of matrices: patches of the image times filters, on one rank or several.

Source: Chellapilla, Puri and Simard, High Performance Convolutional Neural Networks for Document
Processing, 2006.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pycoll.parallel import collectives
from pycoll.parallel.ledger import Line
from pycoll.parallel.placement import share


def im2col(x: Tensor, kernel: tuple[int, int], stride: int = 1, padding: int = 0) -> Tensor:
    """The matrix whose columns are the patches of an image that a filter meets.

    Args:
        x: Images, shape [N, C, H, W].
        kernel: Height and width of the filter.
        stride: Steps between patches.
        padding: Zeros around the image.

    Returns:
        Shape [N, C * kernel height * kernel width, patches], as torch.nn.functional.unfold.
    """
    x = torch.nn.functional.pad(x, (padding,) * 4)
    patches = x.unfold(2, kernel[0], stride).unfold(3, kernel[1], stride)  # [N, C, h, w, kh, kw]
    return patches.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def conv2d_by_gemm(
    x: Tensor, weight: Tensor, line: Line | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """A convolution as one product of the matrices of filters and of patches.

    Args:
        x: Images, shape [N, C, H, W], whole.
        weight: Filters, shape [F, C, kh, kw], whole.
        line: Ranks, each of which multiplies its share of the filters; None: this one alone.
        stride: Steps between patches.
        padding: Zeros around the image.

    Returns:
        Shape [N, F, H', W'], whole, as torch.nn.functional.conv2d.
    """
    num_filters, _, *kernel = weight.shape
    filters = weight.flatten(1)
    if line is not None:
        start, stop = share(num_filters, line.size, line.rank)
        filters = filters[start:stop]
        x = collectives.copy_to(x, line)
    y = filters @ im2col(x, (kernel[0], kernel[1]), stride, padding)
    if line is not None:
        y = collectives.gather_from(y, line, 1, num_filters)
    rows = (x.shape[2] + 2 * padding - kernel[0]) // stride + 1
    return y.unflatten(2, (rows, -1))


__all__ = ["conv2d_by_gemm", "im2col"]
