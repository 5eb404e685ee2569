"""The state of a shard as bytes: a structure as JSON, and behind it the bytes of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycoll.errors import Error
from pycoll.parallel.core import structures

_LENGTH_BYTES = 8  # of the length of the JSON
_ALIGNMENT = 8  # of each tensor


def pack(value: Any) -> Tensor:
    """Writes a structure of plain values and CPU tensors.

    Returns:
        [nbytes] uint8: the length of the JSON, the JSON, then each tensor from a multiple of 8.
    """
    tensors: list[Tensor] = []

    def leaf(x: Any) -> tuple[str, Any] | None:
        if not isinstance(x, Tensor):
            return None
        tensors.append(x.detach().contiguous())
        return "tensor", [structures.dtype_name(x.dtype), list(x.shape)]

    text = structures.encode(value, leaf)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    pieces = [_filled(torch.frombuffer(bytearray(head), dtype=torch.uint8))]
    pieces += [_filled(x.reshape(-1).view(torch.uint8)) for x in tensors if x.numel()]
    return torch.cat(pieces)


def unpack(body: Tensor, sender: str) -> Any:
    """Reads what `pack` wrote.

    Raises:
        Error: It is something else.
    """
    length = int.from_bytes(body[:_LENGTH_BYTES].numpy().tobytes(), "little")
    text = body[_LENGTH_BYTES : _LENGTH_BYTES + length]
    place = _aligned(_LENGTH_BYTES + length)

    def leaf(kind: str, content: Any) -> Tensor:
        nonlocal place
        if kind != "tensor":
            raise ValueError(f"unknown kind {kind!r}")
        dtype, shape = structures.dtype_of(content[0]), structures.shape_of(content[1])
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if place + nbytes > body.numel():
            raise ValueError(f"a tensor of {nbytes} bytes at {place} of {body.numel()}")
        found = body[place : place + nbytes].clone().view(dtype).view(shape)
        place += _aligned(nbytes)
        return found

    found = structures.decode(text.numpy().tobytes(), leaf, sender)
    if place != body.numel():
        raise Error(f"{sender} sent {body.numel()} bytes of a shard, expected {place}")
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _filled(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, _aligned(x.numel()) - x.numel()))


__all__ = ["pack", "unpack"]
