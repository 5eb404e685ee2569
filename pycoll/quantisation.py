"""Int8 with a float32 scale per block of 256 elements: 1.016 bytes for each element."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256  # elements that share a scale: 1.6 % of the bytes sent
_LARGEST = 127


def quantise(x: Tensor) -> Tensor:
    """Rounds a vector to int8.

    Args:
        x: [count], of any floating dtype. A block with an infinity or a NaN becomes NaN.

    Returns:
        [nbytes(count)] uint8: the scales, then the values in whole blocks.
    """
    num_blocks = -(-x.numel() // _BLOCK)
    blocks = torch.nn.functional.pad(x.float(), (0, num_blocks * _BLOCK - x.numel()))
    blocks = blocks.view(-1, _BLOCK)
    scales = blocks.abs().amax(1) / _LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divisor = torch.where(scales > 0, scales, 1).unsqueeze(1)  # 1 where the scale is 0 or NaN
    rounded = (blocks / divisor).nan_to_num(0).round().clamp(-_LARGEST, _LARGEST)
    values = rounded.to(torch.int8).view(-1)
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)])


def dequantise(sent: Tensor, count: int) -> Tensor:
    """The [count] float32 numbers that `quantise` rounded."""
    scale_bytes = 4 * -(-count // _BLOCK)
    scales = sent[:scale_bytes].view(torch.float32)
    values = sent[scale_bytes:].view(torch.int8)
    return (values.view(-1, _BLOCK).float() * scales.unsqueeze(1)).view(-1)[:count]


def nbytes(count: int) -> int:
    """Bytes of `count` quantised elements."""
    return -(-count // _BLOCK) * (_BLOCK + 4)


__all__ = ["dequantise", "nbytes", "quantise"]
