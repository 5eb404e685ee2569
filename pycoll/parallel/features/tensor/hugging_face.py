"""Plans that models of transformers bring along, as plans of `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pycoll.errors import UsageError

# Styles of transformers; None: no layer changes by it.
_STYLES: dict[str, str | None] = {
    "colwise": "col",
    "rowwise": "row",
    "colwise_rep": "vocab",
    "colwise_gather_output": "vocab",
    "embedding_rowwise": "vocab",
    "vocab_parallel_rowwise": "vocab",
    "replicated_with_grad_allreduce": "inside",
    "sequence_parallel": None,
    "moe_tp_experts": "packed",
    "packed_colwise": None,  # of a tensor of these experts
}


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Reads the plan of a model of transformers: its `tp_plan`, or that of its configuration.

    Args:
        model: A model of transformers before `parallelize`.

    Returns:
        A plan for `parallelize(..., tp=)`. An output layer that transformers would gather is
        "vocab", and so is the embedding if it is tied to it.

    Raises:
        UsageError: The model has no plan, or a style that has no counterpart.
    """
    given = _given(model)
    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, str] = {}
    for pattern, style in given.items():
        if style not in _STYLES:
            raise UsageError(
                f"tp_plan: {pattern!r} has the style {style!r} of transformers, which has no "
                "counterpart here: write the plan by hand"
            )
        ours = _STYLES[style]
        matched = [name for name in names if _matches(name, pattern)]
        if ours is None or not matched:
            continue
        plan |= dict.fromkeys(matched, ours)
        if ours in ("col", "row"):  # parents gather their input with sequence_parallel
            plan |= {n.rpartition(".")[0]: "region" for n in matched if "." in n}
    modules = dict(model.named_modules())
    tables = {id(modules[n].weight): n for n, style in plan.items() if style == "vocab"}
    for name in names:
        if isinstance(modules[name], nn.Embedding) and id(modules[name].weight) in tables:
            plan[name] = "vocab"
    return plan


def _given(model: nn.Module) -> dict[str, Any]:
    """The patterns of the model and of its configuration, by names within the model."""
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    found = {f"{inside}{pattern}": style for pattern, style in base.items()}
    for attribute in ("_tp_plan", "tp_plan"):
        own = getattr(model, attribute, None)
        if isinstance(own, Mapping):
            found |= own
    if not found:
        raise UsageError(
            f"tp_plan: {type(model).__name__} has no plan of transformers: write one, or take "
            "pc.auto_plan(model, x)"
        )
    return found


def _matches(name: str, pattern: str) -> bool:
    """As in transformers, `*` is one part of a name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


__all__ = ["tp_plan"]
