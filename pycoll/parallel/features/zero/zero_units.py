"""ZeRO 3: gathers a unit's parameters for its forward and backward pass, then releases them.

Units are the blocks of the model, and the parameters outside the blocks. Between its passes a
unit keeps only this rank's share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from pycoll.errors import UsageError
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.data.buckets import Bucket


def units_of(model: nn.Module, blocks: str | None) -> list[tuple[nn.Module, set[str]]]:
    """The units of a model: modules and full names of their parameters; the rest comes last.

    Args:
        model: The model whose parameters are listed.
        blocks: Name of the list of blocks; None: the children of the model.

    Raises:
        UsageError: The list does not exist.
    """
    names = [name for name, _ in model.named_parameters()]
    try:
        parent = model.get_submodule(blocks or "")
    except AttributeError:
        raise UsageError(f"blocks {blocks!r}: {type(model).__name__} has no such list") from None
    units: list[tuple[nn.Module, set[str]]] = []
    aliases: dict[int, list[str]] = {}  # all names of a parameter; several, if it is tied
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for child, module in _called_children(parent, f"{blocks}." if blocks else ""):
        inside = {
            of[0]
            for of in aliases.values()
            if all(name.startswith(f"{child}.") for name in of)  # no other unit needs it
        }
        if inside:
            units.append((module, inside))
    rest = set(names).difference(*(inside for _, inside in units))
    return [*units, (model, rest)] if rest else units


def _called_children(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children, with full names; a list is not called itself, so its children instead."""
    for name, module in parent.named_children():
        if type(module) in (nn.ModuleList, nn.ModuleDict):
            yield from _called_children(module, f"{prefix}{name}.")
        else:
            yield prefix + name, module


def put_together_when_needed(module: nn.Module, buckets: list[Bucket], *, keep: bool) -> None:
    """Hooks a unit so that its parameters are gathered while it runs.

    Args:
        module: The unit.
        buckets: The buckets with its parameters.
        keep: Keep the parameters between forward and backward, for parameters outside the blocks:
            both ends of each pass need them.
    """

    def before(module: nn.Module, args: Any) -> None:
        for bucket in buckets:
            bucket.gather()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not keep or not torch.is_grad_enabled():
            for bucket in buckets:
                bucket.release()
        made = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if made and not keep:
            register_multi_grad_hook(made, before_backward, mode="any")

    def before_backward(gradient: torch.Tensor) -> None:
        for bucket in buckets:
            bucket.gather()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


__all__ = ["put_together_when_needed", "units_of"]
