"""Pieces of a state as ranks list them to each other, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pycoll import _core
from pycoll.parallel.core.structures import dtype_name, dtype_of
from pycoll.parallel.trainer.places import Place

_LINE = 16  # bytes
_STREAMED_BYTES = 64 << 10  # the size from which copies are written past the caches

Key = tuple[str, Place]  # the name of a tensor, and the place of a piece in it


def listed(pieces: Mapping[Key, Tensor]) -> list[Any]:
    """Names, places and dtypes, as JSON."""
    return [
        [name, place.as_json(), place.count, dtype_name(piece.dtype)]
        for (name, place), piece in pieces.items()
    ]


def of_list(found: list[Any]) -> dict[Key, torch.dtype]:
    """Reads what `listed` returned."""
    return {
        (name, Place.of_json(place, count)): dtype_of(dtype) for name, place, count, dtype in found
    }


def num_bytes(key: Key, dtype: torch.dtype) -> int:
    """Bytes of a piece in a message: whole lines, so that each piece is aligned."""
    return -(-key[1].count * dtype.itemsize // _LINE) * _LINE


def in_lines(pieces: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of flat pieces, each filled up to whole lines."""
    found = [torch.empty(0, dtype=torch.uint8)]
    for piece in pieces:
        data = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found += [data, torch.zeros(-len(data) % _LINE, dtype=torch.uint8)]
    return found


def cut(flat: Tensor, keys: Mapping[Key, torch.dtype]) -> dict[Key, Tensor]:
    """The pieces whose lines follow each other in `flat`, as views."""
    found, at = {}, 0
    for key, dtype in keys.items():
        found[key] = flat[at : at + key[1].count * dtype.itemsize].view(dtype)
        at += num_bytes(key, dtype)
    return found


def copied(flat: Tensor, free: Tensor | None = None) -> Tensor:
    """A copy of a flat piece on the CPU.

    Args:
        flat: The piece.
        free: Memory for the copy, of the same size and dtype; None: new memory.

    Cost: bytes of the piece read once and written once. A usual copy also reads what it overwrites,
        unless it is larger than the caches.
    """
    if flat.device.type != "cpu":
        return flat.to("cpu", copy=True) if free is None else free.copy_(flat)
    flat = flat.detach()
    result = torch.empty_like(flat) if free is None else free
    if flat.nbytes < _STREAMED_BYTES or not flat.is_contiguous():
        return result.copy_(flat)
    to, source = (one.view(torch.uint8).numpy() for one in (result, flat))
    _core._copy_bytes(to, source, streaming=True)
    return result


def of(name: str) -> str:
    """The parameter or buffer (`Held.of`) of a tensor of the state, by the tensor's name."""
    return name if name.startswith("buffer:") else name.rsplit(":", 1)[-1]


__all__ = ["Key", "copied", "cut", "in_lines", "listed", "num_bytes", "of", "of_list"]
