"""Places of flat pieces in whole tensors, and whole tensors from pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core.placement import Placement


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a flat piece in a whole tensor.

    Attributes:
        placement: Place of a rank's part in the whole tensor.
        start: First element of the piece in the part.
        count: Number of elements.
    """

    placement: Placement
    start: int
    count: int

    def as_json(self) -> dict[str, Any]:
        """As a dict; the count is that of the piece."""
        placement = self.placement
        return {
            "shape": placement.shape,
            "dim": placement.dim,
            "ranges": placement.ranges,
            "start": self.start,
        }

    @staticmethod
    def of_json(place: Mapping[str, Any], count: int) -> Place:
        """Reads what `as_json` returned."""
        ranges = tuple((int(start), int(stop)) for start, stop in place["ranges"])
        shape = tuple(int(size) for size in place["shape"])
        return Place(Placement(shape, place["dim"], ranges), int(place["start"]), count)


def cover_once(places: Sequence[Place]) -> bool:
    """Whether pieces of one tensor cover each of its elements exactly once."""
    shape, dim = places[0].placement.shape, places[0].placement.dim
    if any((place.placement.shape, place.placement.dim) != (shape, dim) for place in places):
        return False
    spans: dict[Placement, list[tuple[int, int]]] = {}
    for place in places:
        spans.setdefault(place.placement, []).append((place.start, place.start + place.count))
    placements_are_full = all(
        _is_partition(of_placement, torch.Size(placement.local_shape).numel())
        for placement, of_placement in spans.items()
    )
    if dim is None or not torch.Size(shape).numel():
        return placements_are_full
    ranges = [each for placement in spans for each in placement.ranges]
    return placements_are_full and _is_partition(ranges, shape[dim])


def assemble(pieces: Sequence[tuple[Place, Tensor]]) -> Tensor:
    """The whole tensor of pieces that cover it once, at least one."""
    (first, values), *_ = pieces
    result = torch.empty(first.placement.shape, dtype=values.dtype)
    parts: dict[Placement, Tensor] = {}
    for place, values in pieces:
        placement = place.placement
        if placement not in parts:
            parts[placement] = torch.empty(placement.local_shape, dtype=values.dtype)
        parts[placement].view(-1)[place.start : place.start + place.count] = values
    for placement, part in parts.items():
        placement.put(part, result)
    return result


def _is_partition(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether the spans, in some order, follow each other from 0 to `size`."""
    at = 0
    for start, stop in sorted(spans):
        if start != at or stop < start:
            return False
        at = stop
    return at == size


__all__ = ["Place", "assemble", "cover_once"]
