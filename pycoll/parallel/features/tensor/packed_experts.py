"""Experts whose weights are two tensors [experts, outputs, inputs], as in models of transformers.

Each rank has a part of the hidden units of every expert, as of an MLP: columns of the first
product, rows of the second one. One all_reduce of the tokens in each direction, and one of the
routing weights' gradients. Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.specs import replace
from pycoll.parallel.features.tensor.shared import Shared

# The number of equal parts of each weight's outputs; a gate and its factor lie in one weight.
_FIRST = {"gate_up_proj": 2, "up_proj": 1}
_SECOND = "down_proj"


def share_experts(shared: Shared, where: str, experts: nn.Module) -> None:
    """Shares the experts of a module out, in place.

    Args:
        shared: Receives the placements.
        where: Start of an error's text.
        experts: Its forward gets tokens [n, d], experts' numbers and weights [n, k], and returns
            the weighted sums [n, d].

    Raises:
        UsageError: It has other parameters, or sequence_parallel gives it a part of the tokens.
    """
    own = dict(experts.named_parameters(recurse=False))
    first = next((name for name in _FIRST if name in own), "")
    fits = own.keys() == {first, _SECOND} and all(p.dim() == 3 for p in own.values())
    if not fits or getattr(experts, "is_transposed", False):
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in own.items())
        raise UsageError(
            f"{where} cannot be packed: expected gate_up_proj or up_proj [experts, outputs, "
            f"inputs] and down_proj, got {shapes or 'no parameters'}"
        )
    if shared.sequence:
        raise UsageError(f"{where}: packed experts need all tokens: leave sequence_parallel out")
    parts = _FIRST[first]
    if own[first].shape[1] != parts * own[_SECOND].shape[2]:
        raise UsageError(
            f"{where}: {own[first].shape[1]} outputs of {first} are not {parts} times the "
            f"{own[_SECOND].shape[2]} inputs of {_SECOND}"
        )
    shared.shorten(own[first], 1, parts)
    shared.shorten(own[_SECOND], 2)
    experts.forward = partial(_run, shared.group, experts.forward)  # type: ignore[method-assign]


def _run(group: AxisGroup, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Tokens and routing weights are whole; their gradients are sums over the ranks."""

    def enter(x: Tensor) -> Tensor:
        return collectives.copy_to(x, group) if x.is_floating_point() else x

    args, kwargs = replace(args, Tensor, enter), replace(kwargs, Tensor, enter)
    return collectives.reduce_from(forward(*args, **kwargs), group)


__all__ = ["share_experts"]
