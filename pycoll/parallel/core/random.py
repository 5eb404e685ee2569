"""Random numbers by place: the same for an element wherever, and in whatever part, it is made.

Element i of a stream is word i of Philox 4x64-10 (Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, 2011), whose key is a digest of the stream's name. So a part needs no word of the rest.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_WORDS = 4  # that Philox makes of one counter


def words(name: str, start: int, count: int) -> np.ndarray:
    """Elements `start` to `start + count` of a stream: 64 random bits each.

    Args:
        name: Of the stream.
        start: First element.
        count: Number of elements.

    Returns:
        Of dtype uint64, shape [count].

    Cost: about 2 ns per element.
    """
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    first, skipped = divmod(start, _WORDS)
    drawn = np.random.Philox(key=key, counter=first).random_raw(skipped + count)
    return np.asarray(drawn[skipped:])


def uniform(name: str, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
    """A float64 tensor of numbers between `low` and `high`, in the order of its elements."""
    return low + (high - low) * _open_unit(name, shape)


def normal(name: str, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Tensor:
    """A float64 tensor of normal numbers, by the inverse of their distribution."""
    return mean + std * torch.special.ndtri(_open_unit(name, shape))


def keep_mask(name: str, start: int, count: int, drop: float) -> Tensor:
    """Which elements dropout keeps: bools of shape [count], True with probability 1 - drop."""
    limit = np.uint64(min(int(drop * 2.0**64), 2**64 - 1))
    return torch.from_numpy(words(name, start, count) >= limit)


def _open_unit(name: str, shape: tuple[int, ...]) -> Tensor:
    """Between 0 and 1, neither of them: 53 bits and a half."""
    bits = words(name, 0, math.prod(shape)) >> np.uint64(11)
    return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(shape)


__all__ = ["keep_mask", "normal", "uniform", "words"]
