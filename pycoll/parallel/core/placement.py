"""Where a rank's part lies in the whole tensor: shares, and placements of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # starts and ends, in the order in which they are held


def share(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Start and end of part `part` of `size` items; if uneven, the first parts get one more."""
    least, more = divmod(size, num_parts)
    start = part * least + min(part, more)
    return start, start + least + (part < more)


def share_sizes(size: int, num_parts: int) -> list[int]:
    """The sizes of all parts."""
    return [stop - start for start, stop in (share(size, num_parts, i) for i in range(num_parts))]


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a parameter that a rank holds.

    Attributes:
        shape: Shape of the whole parameter.
        dim: The dimension that is shared out; None: every rank holds the whole parameter.
        ranges: Starts and ends along `dim`; they are consecutive in the local tensor.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: Ranges = ()

    def take(self, whole: Tensor) -> Tensor:
        """The local part of a whole tensor; a copy if it is shared out."""
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)

    def put(self, local: Tensor, whole: Tensor) -> None:
        """Writes the local part to its place in the whole tensor."""
        if self.dim is None:
            whole.copy_(local)
            return
        at = 0
        for start, stop in self.ranges:
            part = local.narrow(self.dim, at, stop - start)
            whole.narrow(self.dim, start, stop - start).copy_(part)
            at += stop - start

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local part."""
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The ranges that elements `start` to `stop` of the concatenated ranges cover."""
    found, at = [], 0
    for first, last in ranges:
        low, high = max(start - at, 0), min(stop - at, last - first)
        if low < high:
            found.append((first + low, first + high))
        at += last - first
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a rank holds; several dimensions may be shared out.

    Attributes:
        shape: Shape of the whole tensor.
        ranges: The ranges that the rank holds along each dimension that is shared out.
    """

    shape: tuple[int, ...]
    ranges: dict[int, Ranges] = field(default_factory=dict)

    def take(self, whole: Tensor) -> Tensor:
        """The local part of a whole tensor."""
        for dim, ranges in self.ranges.items():
            whole = Placement(tuple(whole.shape), dim, ranges).take(whole)
        return whole


__all__ = ["Part", "Placement", "Ranges", "share", "share_sizes", "within"]
