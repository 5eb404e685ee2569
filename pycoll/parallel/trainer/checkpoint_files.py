"""The files of a checkpoint: pieces of tensors, and their places in the whole tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.core.placement import Placement

_PLACES = "pycoll"  # key of the header


def write(path: Path, tensors: dict[str, Tensor], places: dict[str, Any]) -> None:
    """Writes flat pieces and waits until they are on the disk.

    Raises:
        OSError: The write failed.
    """
    from safetensors.torch import save_file

    flat = {name: tensor.clone() for name, tensor in tensors.items()}  # none shares memory
    save_file(flat, path, metadata={_PLACES: json.dumps(places)})
    fsync(path)


def fsync(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Reader:
    """Assembles whole tensors from the files of a checkpoint."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        """Reads the headers.

        Raises:
            UsageError: A file is missing or does not belong to a checkpoint.
        """
        from safetensors import safe_open

        self._pieces: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
        for name in files:
            try:
                opened = safe_open(folder / name, framework="pt")
                places = json.loads(opened.metadata()[_PLACES])
            except Exception as error:
                raise UsageError(f"load: {folder / name} cannot be read: {error}") from error
            for tensor, place in places.items():
                self._pieces.setdefault(tensor, []).append((opened, place))

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def states(self, name: str) -> list[str]:
        """Keys of the optimizer's state for a parameter."""
        ends = f":{name}"
        return [
            key[len("state:") : -len(ends)]
            for key in self._pieces
            if key.startswith("state:") and key.endswith(ends) and key.count(":") == 2
        ]

    def whole(self, name: str) -> Tensor:
        """Assembles a whole tensor from its pieces.

        Raises:
            UsageError: The tensor, or some of its elements, are missing.
        """
        if name not in self._pieces:
            raise UsageError(f"load: the checkpoint has no tensor {name!r}")
        result: Tensor | None = None
        count = 0
        by_part: dict[str, tuple[Placement, Tensor]] = {}
        # Several ranks may have written a value that they all hold, such as a number of steps.
        of_place = {str(place): (opened, place) for opened, place in self._pieces[name]}
        for opened, place in of_place.values():
            piece = opened.get_tensor(name)
            ranges = tuple((start, stop) for start, stop in place["ranges"])
            placement = Placement(tuple(place["shape"]), place["dim"], ranges)
            if result is None:
                result = torch.empty(placement.shape, dtype=piece.dtype)
            fresh = placement, torch.empty(placement.local_shape, dtype=piece.dtype)
            _, local = by_part.setdefault(str(ranges), fresh)
            local.view(-1)[place["start"] : place["start"] + piece.numel()] = piece
            count += piece.numel()
        assert result is not None
        if count != result.numel():
            raise UsageError(f"load: tensor {name!r} has {count} of {result.numel()} elements")
        for placement, local in by_part.values():
            placement.put(local, result)
        return result


__all__ = ["Reader", "fsync", "write"]
