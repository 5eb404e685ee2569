"""ZeRO 3: gathers a unit's parameters for its forward and backward pass, then releases them.

Units are the blocks of the model, and the parameters outside the blocks. Between its passes a
unit keeps only this rank's share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.data.buckets import Bucket


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
    prefix = f"{blocks}." if blocks else ""
    units: list[tuple[nn.Module, set[str]]] = []
    for child, module in parent.named_children():
        inside = {name for name in names if name.startswith(f"{prefix}{child}.")}
        if inside:
            units.append((module, inside))
    rest = set(names).difference(*(inside for _, inside in units))
    return [*units, (model, rest)] if rest else units


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

    def before_backward(module: nn.Module, grad: Any) -> None:
        for bucket in buckets:
            bucket.gather()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    if not keep:
        module.register_full_backward_pre_hook(before_backward)


__all__ = ["put_together_when_needed", "units_of"]
