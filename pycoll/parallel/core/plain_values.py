"""Python values as JSON and back: what state dicts of loaders, schedulers and scalers contain.

JSON alone would turn tuples into lists and numbers that are keys into texts. Nothing is pickled, so
reading a file runs no code.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.errors import UsageError


def encode(value: Any, where: str) -> Any:
    """A JSON value that `decode` turns back.

    Args:
        value: None, a bool, number or text, a CPU tensor, an array of numbers, or a list, tuple,
            dict or Counter of such values.
        where: Name of the value, for the error.

    Raises:
        UsageError: Something in it is of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(one, where) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(one, where) for one in value]}
    if isinstance(value, dict):
        items = [[encode(key, where), encode(one, where)] for key, one in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": items}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": _text(flat.tobytes()), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        text, dtype = _text(np.ascontiguousarray(value).tobytes()), value.dtype.str
        return {"array": text, "dtype": dtype, "shape": list(value.shape)}
    raise UsageError(
        f"save: {where} contains a {type(value).__name__}, expected numbers, texts, tensors, and "
        "lists, tuples and dicts of them"
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(one) for one in value["tuple"])
    for key, kind in (("dict", dict), ("counter", Counter)):
        if key in value:
            return kind({decode(name): decode(one) for name, one in value[key]})
    if "tensor" in value:
        flat = torch.frombuffer(bytearray(base64.b64decode(value["tensor"])), dtype=torch.uint8)
        return flat.view(getattr(torch, value["dtype"])).view(value["shape"]).clone()
    array = np.frombuffer(base64.b64decode(value["array"]), np.dtype(value["dtype"]))
    return array.reshape(value["shape"]).copy()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


__all__ = ["decode", "encode"]
