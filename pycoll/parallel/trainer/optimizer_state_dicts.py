"""The optimizer's state in the form of torch, for torch.distributed.checkpoint.

It has the keys of `torch.distributed.checkpoint.state_dict`: names of parameters, not numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.trainer.fused import OWN
from pycoll.parallel.trainer.optimizers import Optimizer
from pycoll.parallel.trainer.pieces import is_of_elements
from pycoll.parallel.trainer.state_dicts import Parts


def optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state: parts of tensors, under the whole shapes of the plain model.

    `dcp.save({"optimizer": pc.optimizer_state_dict(optimizer)}, ...)` writes what torch's
    `get_optimizer_state_dict` would for the plain model. To read: fill such a dict by `dcp.load`,
    and give it to `load_optimizer_state_dict`.

    Args:
        optimizer: An optimizer that `pc.optimizer` returned. If it has not stepped yet, its state
            is made first, by a step without a learning rate on all ranks.

    Returns:
        "state": by name and key, of this rank's parameters; "param_groups": the options of each
        group, with the names of its parameters.
    """
    _make_state(optimizer)
    found: dict[str, dict[str, Any]] = {}
    for name, piece in optimizer.trainer.reducer.pieces.items():
        state = optimizer.inner.state.get(piece.value, {})
        found[name] = {
            key: Parts.of(value, piece.placement, piece.start, saved_here=piece.owned)
            if is_of_elements(value, piece.value)
            else value
            for key, value in state.items()
        }
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": names}
        for group, names in zip(optimizer.inner.param_groups, optimizer.names, strict=True)
    ]
    return {"state": {name: of for name, of in found.items() if of}, "param_groups": groups}


def load_optimizer_state_dict(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the optimizer's state, on any mesh.

    Args:
        optimizer: An optimizer that `pc.optimizer` returned.
        state: What `optimizer_state_dict` returned, after `torch.distributed.checkpoint.load` has
            filled it; or that of the plain model, whole and identical on all ranks.

    Raises:
        UsageError: It has another number of groups, or lacks the state of a parameter.
    """
    groups = state["param_groups"]
    if len(groups) != len(optimizer.inner.param_groups):
        raise UsageError(
            f"load_optimizer_state_dict: the state has {len(groups)} groups of parameters, "
            f"expected {len(optimizer.inner.param_groups)}"
        )
    _make_state(optimizer)
    for name, piece in optimizer.trainer.reducer.pieces.items():
        own = optimizer.inner.state.get(piece.value, {})
        if own and name not in state["state"]:
            raise UsageError(f"load_optimizer_state_dict: there is no state of {name!r}")
        for key, value in own.items():
            saved = state["state"][name][key]
            if isinstance(saved, Parts):
                continue  # views of what the rank has
            if is_of_elements(value, piece.value):
                value.copy_(piece.cut(saved).view_as(value))
            elif isinstance(value, Tensor):
                value.copy_(saved)
            else:
                own[key] = saved
    for group, saved in zip(optimizer.inner.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key not in OWN})


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    """Makes the state of an optimizer that has not stepped, by a step that changes nothing."""
    inner = optimizer.inner
    if inner.state:
        return
    rates = [group["lr"] for group in inner.param_groups]
    pieces = [piece.value for piece in optimizer.trainer.reducer.pieces.values()]
    gradients = [value.grad for value in pieces]
    values = [value.detach().clone() for value in pieces]
    for value in pieces:
        value.grad = torch.zeros_like(value)
    for group in inner.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    inner.step()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    for value, before, gradient in zip(pieces, values, gradients, strict=True):
        value.copy_(before)
        value.grad = gradient
    for state in inner.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


__all__ = ["load_optimizer_state_dict", "optimizer_state_dict"]
