"""Structures of tuples, lists and dicts as JSON, which ranks send each other.

A message of a peer becomes plain data and nothing else: no class of it is looked up, and no code
of it runs.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pycoll.errors import Error, UsageError

MAX_BYTES = 1 << 24  # of a structure as JSON
_PLAIN = (type(None), bool, int, float, str)
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError)

# What is neither plain nor a container: a pair of a kind and its JSON, or None if unsupported.
EncodeLeaf = Callable[[Any], "tuple[str, Any] | None"]
DecodeLeaf = Callable[[str, Any], Any]


def encode(value: Any, encode_leaf: EncodeLeaf) -> bytes:
    """Writes a structure as JSON.

    Args:
        value: None, bools, numbers, text, torch dtypes, tuples, lists, dicts and leaves.
        encode_leaf: Returns the kind and the JSON of a leaf, None for other values.

    Raises:
        UsageError: A value is none of these, or the JSON is longer than MAX_BYTES.
    """
    text = json.dumps(_to_json(value, encode_leaf)).encode()
    if len(text) > MAX_BYTES:
        raise UsageError(f"a structure of {len(text)} bytes as JSON: at most {MAX_BYTES} are sent")
    return text


def decode(text: bytes, decode_leaf: DecodeLeaf, sender: str) -> Any:
    """Reads what `encode` wrote.

    Args:
        text: JSON.
        decode_leaf: Makes a leaf from its kind and its JSON; raises ValueError for unknown ones.
        sender: Where the text is from, for the error message.

    Raises:
        Error: The text is not what `encode` writes.
    """
    try:
        return _from_json(json.loads(text), decode_leaf)
    except _MALFORMED as error:
        raise Error(
            f"{sender} sent a structure that cannot be read ({type(error).__name__}: "
            f"{str(error)[:200]!r}): expected JSON; run the same version of pycoll on all ranks"
        ) from None


def check_length(nbytes: int, sender: str) -> int:
    """Returns the announced length of a structure. Raises Error unless it is 0 to MAX_BYTES."""
    if not 0 <= nbytes <= MAX_BYTES:
        raise Error(f"{sender} announced a structure of {nbytes} bytes: expected 0 to {MAX_BYTES}")
    return nbytes


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def device_of(name: Any) -> str:
    """The kind of a device of torch that has memory. Raises ValueError if there is none."""
    if not isinstance(name, str) or name == "meta" or torch.device(name).index is not None:
        raise ValueError(f"{name!r} is no kind of device")
    return name


def shape_of(value: Any) -> tuple[int, ...]:
    """A shape from its JSON. Raises ValueError if it is none."""
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)


def _to_json(value: Any, encode_leaf: EncodeLeaf) -> Any:
    def one(item: Any) -> Any:
        return _to_json(item, encode_leaf)

    if isinstance(value, _PLAIN):
        return value
    if (leaf := encode_leaf(value)) is not None:
        return {leaf[0]: leaf[1]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = list(value._fields)
        return {"named": [type(value).__name__, fields, [one(item) for item in value]]}
    if isinstance(value, tuple):
        return {"tuple": [one(item) for item in value]}
    if isinstance(value, list):
        return [one(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[one(key), one(item)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise UsageError(
        f"a {type(value).__name__} cannot be sent to another rank: expected tensors, numbers, "
        "text, None, and tuples, lists and dicts of them"
    )


def _from_json(value: Any, decode_leaf: DecodeLeaf) -> Any:
    def one(item: Any) -> Any:
        return _from_json(item, decode_leaf)

    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [one(item) for item in value]
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(one(item) for item in _list(content))
    if kind == "named":
        name, fields, items = content
        made: Any = namedtuple(name, fields)  # type: ignore[misc]
        return made(*map(one, _list(items)))
    if kind == "dict":
        return {one(key): one(item) for key, item in _list(content)}
    if kind == "dtype":
        return dtype_of(content)
    return decode_leaf(kind, content)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


__all__ = [
    "MAX_BYTES",
    "check_length",
    "decode",
    "device_of",
    "dtype_name",
    "dtype_of",
    "encode",
    "shape_of",
]
