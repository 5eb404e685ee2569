"""The list of equal blocks of a model, and the model with one block of each kind in its place."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn


def find_blocks(model: nn.Module) -> str | None:
    """The name of the longest list of layers with one class and parameters; None: there is none."""
    found, most = None, 1
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) <= most:
            continue
        kinds = {type(child) for child in module}
        if len(kinds) == 1 and all(any(True for _ in child.parameters()) for child in module):
            found, most = name, len(module)
    return found


def kinds_of(blocks: nn.Module) -> list[int]:
    """For each block, the index of the first block of its kind: class, shapes and settings."""
    first: dict[Any, int] = {}
    return [first.setdefault(_kind(block), i) for i, block in enumerate(blocks.children())]


def _kind(block: nn.Module) -> Any:
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in tensors)
    plain = (int, float, bool, str, type(None))
    settings = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and not key.startswith("_") and "idx" not in key
    )
    return type(block), shapes, tuple(type(m) for m in block.modules()), settings


@dataclass(frozen=True, slots=True)
class Shortened:
    """A model with one block of each kind.

    Attributes:
        model: The model. All copies are made from it, so that they copy few tensors.
        kinds: For each block of the whole model, the place of its kind in the shortened list.
    """

    model: nn.Module
    kinds: list[int]


def shorten(model: nn.Module, blocks: str | None) -> Shortened:
    """Shortens the list of blocks.

    Args:
        model: The plain model.
        blocks: Name of the list; None: the model stays as it is.

    Returns:
        The shortened model, with the parameters and buffers of the model itself.
    """
    if blocks is None:
        return Shortened(model, [])
    whole = model.get_submodule(blocks)
    first = kinds_of(whole)
    kept = sorted(set(first))
    kinds = [kept.index(of) for of in first]
    if len(kept) == len(first):
        return Shortened(model, kinds)
    few = [block for i, block in enumerate(whole.children()) if first[i] == i]
    is_list = isinstance(whole, nn.ModuleList)
    instead = nn.ModuleList(few) if is_list else nn.Sequential(*few)
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return Shortened(copy.deepcopy(model, {**own, id(whole): instead}), kinds)


__all__ = ["Shortened", "find_blocks", "kinds_of", "shorten"]
