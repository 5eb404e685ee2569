"""Random numbers by place: an element's value does not depend on where or in which part it is made.

Element i of a stream is word i of Philox 4x64-10 (Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, 2011); the key is a digest of the stream's name. So parts are computed independently.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_WORDS = 4  # words that Philox makes of one counter


def words(name: str, start: int, count: int) -> np.ndarray:
    """Elements `start` to `start + count` of a stream, 64 random bits each.

    Args:
        name: Name of the stream.
        start: First element.
        count: Number of elements.

    Returns:
        Array of dtype uint64, shape [count].

    Cost: about 2 ns per element.
    """
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    first, skipped = divmod(start, _WORDS)
    drawn = np.random.Philox(key=key, counter=first).random_raw(skipped + count)
    return np.asarray(drawn[skipped:])


def uniform(
    name: str, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0, *, start: int = 0
) -> Tensor:
    """A float64 tensor of uniform numbers between `low` and `high`, in element order.

    The first one is number `start` of the stream `name`.
    """
    return low + (high - low) * _open_unit(name, shape, start)


def normal(
    name: str, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0, *, start: int = 0
) -> Tensor:
    """As `uniform`, of normal numbers, by the inverse of the distribution function."""
    return mean + std * torch.special.ndtri(_open_unit(name, shape, start))


def keep_mask(name: str, start: int, count: int, drop: float) -> Tensor:
    """Dropout mask: bools of shape [count], True (kept) with probability 1 - drop."""
    limit = np.uint64(min(int(drop * 2.0**64), 2**64 - 1))
    return torch.from_numpy(words(name, start, count) >= limit)


def _open_unit(name: str, shape: tuple[int, ...], start: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1): 53 bits plus one half."""
    bits = words(name, start, math.prod(shape)) >> np.uint64(11)
    return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(shape)


__all__ = ["keep_mask", "normal", "uniform", "words"]
