"""Activation recomputation: layers drop their activations and compute them again in backward.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from pycoll.errors import UsageError
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.batch_norm import SyncBatchNorm
from pycoll.parallel.features.dropout.feature import KeyedDropout
from pycoll.parallel.features.feature import Build, Feature


@dataclass(frozen=True, slots=True)
class Keep:
    """Recomputation that keeps the results of some operators.

    Attributes:
        operators: Names of torch's operators, such as "aten.mm".
        layers: Pattern of layer names; None: the blocks.
    """

    operators: tuple[str, ...]
    layers: str | None = None


# Products with weights stay; attention and element-wise work, large and cheap, are computed again.
# Source: Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198.
SELECTIVE = Keep(("aten.mm", "aten.addmm"))


@dataclass(slots=True)
class Kept:
    """Hears of the results that a `Keep` keeps, where memory is computed.

    Attributes:
        note: Called with each of them; None: none listens.
    """

    note: Callable[[Tensor], Any] | None = None


class Recompute(Feature):
    """Wraps layers.

    Attributes:
        some: Whether any layer recomputes.
        kept: Hears of results that are kept.
    """

    after = (KeyedDropout, SyncBatchNorm)  # the second forward pass runs what they have made

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.some, self.kept = False, Kept()

    def apply(self) -> None:
        build = self.build
        self.some = recompute_layers(
            build.model, build.options.recompute, build.options.pp, build.positions, self.kept
        )


def recompute_layers(
    model: nn.Module,
    which: str | bool | Keep | None,
    blocks: str | None,
    positions: Positions,
    kept: Kept,
) -> bool:
    """Makes layers recompute their activations in backward, in place.

    Args:
        model: The model whose layers recompute.
        which: True or "full": the blocks; "selective": likewise, but results of products with
            weights are kept; a `Keep`; else a pattern of names such as "*.attention".
        blocks: Name of the list of blocks.
        positions: Positions of dropout, restored for the second forward pass.
        kept: Hears of results that are kept.

    Returns:
        Whether any layer recomputes.

    Raises:
        UsageError: No layer matches, or an operator does not exist.
    """
    if not which:
        return False
    keep = SELECTIVE if which == "selective" else which if isinstance(which, Keep) else None
    if keep is not None:
        which = keep.layers or "full"
    if which in (True, "full"):
        chosen = list(model.get_submodule(blocks or "").children())
    else:
        chosen = _outermost(model, str(which))
    if not chosen:
        raise UsageError(f"recompute: {which!r} matches no layer of {type(model).__name__}")
    contexts = noop_context_fn if keep is None else _keeping(keep, kept)
    for module in chosen:
        run = partial(_again, module.forward, positions, contexts)
        module.forward = run  # type: ignore[method-assign]
    return True


def _keeping(keep: Keep, kept: Kept) -> Callable[[], Any]:
    """Makes the contexts of the two forward passes."""
    for name in keep.operators:
        library, _, operator = name.partition(".")
        if not operator or not hasattr(getattr(torch.ops, library), operator):
            raise UsageError(
                f"recompute: there is no operator {name!r}, expected such as 'aten.mm'"
            )

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _name(operator) in keep.operators:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        first, second = create_selective_checkpoint_contexts(policy)
        if kept.note is not None:
            first = _Told(keep.operators, kept.note, first)
        return first, second

    return contexts


def _name(operator: Any) -> str:
    return str(getattr(operator, "overloadpacket", operator))


class _Told(TorchDispatchMode):
    """Tells of the results of some operators, around a context that keeps them."""

    def __init__(
        self, operators: tuple[str, ...], tell: Callable[[Tensor], Any], keeping: Any
    ) -> None:
        super().__init__()
        self._operators, self._tell, self._keeping = operators, tell, keeping

    def __enter__(self) -> Any:
        super().__enter__()
        return self._keeping.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._keeping.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _name(func) in self._operators:
            for tensor in tensors_in(result):
                self._tell(tensor)
        return result


def _outermost(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Returns the matching modules that lie within no other match, so each computes again once."""
    names: list[str] = []
    for name, _ in model.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in names)
        if name and fnmatchcase(name, pattern) and not within:
            names.append(name)
    return [model.get_submodule(name) for name in names]


def _again(
    forward: Callable[..., Any],
    positions: Positions,
    contexts: Callable[[], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    position = positions.now

    def run(*args: Any, **kwargs: Any) -> Any:
        with positions.at(position):
            return forward(*args, **kwargs)

    # Masks are keyed by place, so there is no generator state to restore.
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=contexts,
        **kwargs,
    )


__all__ = ["Keep", "Recompute"]
