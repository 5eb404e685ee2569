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
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # added to the key after each round
_LOW_32, _LOW_64 = (1 << 32) - 1, (1 << 64) - 1


def _key(name: str) -> int:
    """The key of a stream, of 128 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")


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
    first, skipped = divmod(start, _WORDS)
    drawn = np.random.Philox(key=_key(name), counter=first).random_raw(skipped + count)
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


def words_on(device: torch.device, name: str, start: int, count: int) -> Tensor:
    """As `words`, computed on a device by operations of torch: the same bits, as int64.

    Cost: about 400 operations on `count` / 4 elements.
    """
    key = _key(name)
    keys = [key & _LOW_64, key >> 64]
    first, skipped = divmod(start, _WORDS)
    num_counters = -(-(skipped + count) // _WORDS)
    counters = torch.arange(first + 1, first + 1 + num_counters, device=device)
    state = [counters, *[torch.zeros_like(counters)] * 3]
    for _ in range(_ROUNDS):
        high_0, low_0 = _product(_MULTIPLIERS[0], state[0])
        high_1, low_1 = _product(_MULTIPLIERS[1], state[2])
        state = [
            high_1 ^ state[1] ^ _signed(keys[0]),
            low_1,
            high_0 ^ state[3] ^ _signed(keys[1]),
            low_0,
        ]
        keys = [(k + weyl) & _LOW_64 for k, weyl in zip(keys, _WEYL, strict=True)]
    return torch.stack(state, 1).view(-1)[skipped : skipped + count]


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of a * b, unsigned numbers in int64."""
    a_high, a_low = a >> 32, a & _LOW_32
    b_high, b_low = _upper(b), b & _LOW_32
    middle = b_low * a_high, b_high * a_low
    carry = _upper(b_low * a_low) + (middle[0] & _LOW_32) + (middle[1] & _LOW_32)
    high = b_high * a_high + _upper(middle[0]) + _upper(middle[1]) + _upper(carry)
    return high, b * _signed(a)


def _upper(x: Tensor) -> Tensor:
    """The upper 32 of 64 bits."""
    return (x >> 32) & _LOW_32


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def keep_mask(name: str, start: int, count: int, drop: float, device: torch.device) -> Tensor:
    """Dropout mask: bools of shape [count], True (kept) with probability 1 - drop."""
    limit = min(int(drop * 2.0**64), 2**64 - 1)
    if device.type == "cpu":
        return torch.from_numpy(words(name, start, count) >= np.uint64(limit))
    # Signed numbers with the uppermost bit changed compare as the unsigned ones.
    return words_on(device, name, start, count) ^ _signed(1 << 63) >= _signed(limit ^ 1 << 63)


def _open_unit(name: str, shape: tuple[int, ...], start: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1): 53 bits plus one half."""
    bits = words(name, start, math.prod(shape)) >> np.uint64(11)
    return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(shape)


__all__ = ["keep_mask", "normal", "uniform", "words", "words_on"]
