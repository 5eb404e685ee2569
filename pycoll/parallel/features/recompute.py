"""Activation recomputation: layers drop their activations and compute them again in backward.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from pycoll.errors import UsageError
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.features.batch_norm import SyncBatchNorm
from pycoll.parallel.features.dropout.feature import KeyedDropout
from pycoll.parallel.features.feature import Feature


class Recompute(Feature):
    """Wraps layers.

    Attributes:
        some: Whether any layer recomputes.
    """

    after = (KeyedDropout, SyncBatchNorm)  # the second forward pass runs what they have made

    some = False

    def apply(self) -> None:
        build = self.build
        self.some = recompute_layers(
            build.model, build.options.recompute, build.options.pp, build.positions
        )


def recompute_layers(
    model: nn.Module, which: str | bool | None, blocks: str | None, positions: Positions
) -> bool:
    """Makes layers recompute their activations in backward, in place.

    Args:
        model: The model whose layers recompute.
        which: True or "full": the blocks; else a pattern of names such as "*.attention".
        blocks: Name of the list of blocks.
        positions: Positions of dropout, restored for the second forward pass.

    Returns:
        Whether any layer recomputes.

    Raises:
        UsageError: No layer matches.
    """
    if not which:
        return False
    if which in (True, "full"):
        chosen = list(model.get_submodule(blocks or "").children())
    else:
        chosen = _outermost(model, str(which))
    if not chosen:
        raise UsageError(f"recompute: {which!r} matches no layer of {type(model).__name__}")
    for module in chosen:
        module.forward = partial(_again, module.forward, positions)  # type: ignore[method-assign]
    return True


def _outermost(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Returns the matching modules that lie within no other match, so each computes again once."""
    names: list[str] = []
    for name, _ in model.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in names)
        if name and fnmatchcase(name, pattern) and not within:
            names.append(name)
    return [model.get_submodule(name) for name in names]


def _again(forward: Callable[..., Any], positions: Positions, *args: Any, **kwargs: Any) -> Any:
    position = positions.now

    def run(*args: Any, **kwargs: Any) -> Any:
        with positions.at(position):
            return forward(*args, **kwargs)

    # Masks are keyed by place, so there is no generator state to restore.
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


__all__ = ["Recompute", "recompute_layers"]
