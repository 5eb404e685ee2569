"""What replicas send in place of whole vectors: rounded to int8, or the largest elements alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pycoll import quantisation
from pycoll.errors import UsageError


class Compressor(Protocol):
    """Makes short messages of vectors.

    Attributes:
        consensus_rate: Share of the way to the neighbors' mean that a compressed round of gossip
            goes; smaller for rougher compression, which would diverge otherwise.
    """

    @property
    def consensus_rate(self) -> float: ...

    def nbytes(self, count: int) -> int:
        """Bytes of a message for a vector of `count` elements."""

    def encode(self, x: Tensor) -> Tensor:
        """The message for a vector [count] of floats: [nbytes(count)] uint8."""

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """The vector that a message stands for, of the shape [count] and the dtype of `like`."""


@dataclass(frozen=True, slots=True)
class Int8:
    """One byte for each element, and a float32 scale for each 256 of them."""

    consensus_rate: float = 1.0

    def nbytes(self, count: int) -> int:
        """See Compressor."""
        return quantisation.nbytes(count)

    def encode(self, x: Tensor) -> Tensor:
        """See Compressor."""
        return quantisation.quantise(x)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """See Compressor."""
        return quantisation.dequantise(message, like.numel()).to(like.dtype)


@dataclass(frozen=True, slots=True)
class TopK:
    """The elements of largest magnitude: a place and a float32 for each.

    Attributes:
        share: Share of the elements that is sent.
    """

    share: float = 0.01
    consensus_rate: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"topk: a share of {self.share}, expected one above 0 and at most 1")

    def nbytes(self, count: int) -> int:
        """See Compressor."""
        return 8 * self._kept(count)

    def encode(self, x: Tensor) -> Tensor:
        """See Compressor."""
        places = x.abs().topk(self._kept(x.numel()), sorted=False).indices.sort().values
        parts = places.to(torch.int32), x[places].float()
        return torch.cat([part.view(torch.uint8) for part in parts])

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """See Compressor."""
        half = message.numel() // 2
        found = torch.zeros_like(like)
        places = message[:half].view(torch.int32).long()
        found[places] = message[half:].view(torch.float32).to(like.dtype)
        return found

    def _kept(self, count: int) -> int:
        return min(count, max(1, round(self.share * count)))


def compressor_of(compress: str | Compressor | None) -> Compressor | None:
    """The compressor that a user named: None, "int8", "topk", "topk:0.05", or an object.

    Raises:
        UsageError: There is none of this name.
    """
    if compress is None or not isinstance(compress, str):
        return compress
    name, _, share = compress.partition(":")
    if name == "int8" and not share:
        return Int8()
    try:
        if name == "topk":
            return TopK(float(share)) if share else TopK()
    except ValueError:
        pass
    raise UsageError(
        f"compress={compress!r}: expected None, 'int8', 'topk', 'topk:SHARE' (such as 'topk:0.05') "
        "or a Compressor"
    )


class ErrorFeedback:
    """Adds what compression has lost to what is sent next, so that all of it arrives in the end.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", arXiv:1901.09847.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._lost: Tensor | None = None

    def encode(self, x: Tensor) -> Tensor:
        """The message for `x`, [count], and for what earlier messages have lost."""
        wanted = x if self._lost is None else x + self._lost
        message = self.compressor.encode(wanted)
        missing = wanted - self.compressor.decode(message, wanted)
        self._lost = torch.where(missing.isfinite(), missing, 0)
        return message


__all__ = ["Compressor", "ErrorFeedback", "Int8", "TopK", "compressor_of"]
