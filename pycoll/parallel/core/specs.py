"""Descriptions of tensors without their values, used to announce and to replace tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and type of a tensor, and whether its maker wants its gradient.

    Attributes:
        device: Kind of its device; each rank has one device of a kind.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device.type)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def blank(self) -> torch.Tensor:
        """Zeros of this shape that take no memory and cannot be written."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


def replace(value: Any, kind: type | tuple[type, ...], by: Callable[[Any], Any]) -> Any:
    """Replaces every `kind` in a structure of tuples, lists and dicts."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, tuple):
        made = [replace(item, kind, by) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, list):
        return [replace(item, kind, by) for item in value]
    if isinstance(value, dict):
        return {key: replace(item, kind, by) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a structure of tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def describe(value: Any) -> Any:
    """Replaces the tensors of a structure by Specs."""
    return replace(value, torch.Tensor, Spec.of)


def blank(structure: Any) -> Any:
    """Replaces the Specs of a structure by blank tensors."""
    return replace(structure, Spec, Spec.blank)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the hidden state of a block's call: `hidden_states`, else its first tensor."""
    key = _place(args, kwargs)
    return None if key is None else args[key] if isinstance(key, int) else kwargs[key]


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the call's arguments with another hidden state."""
    key = _place(args, kwargs)
    if isinstance(key, int):
        return (*args[:key], hidden, *args[key + 1 :]), kwargs
    return args, {**kwargs, key or "hidden_states": hidden}


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return i
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return "hidden_states"
    return next((key for key, value in kwargs.items() if isinstance(value, torch.Tensor)), None)


__all__ = ["Spec", "blank", "describe", "hidden_of", "replace", "tensors_in", "with_hidden"]
