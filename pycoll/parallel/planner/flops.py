"""Floating-point operations of a model, counted by tracing it without values.

A multiplication and an addition are two operations. Matrix products, convolutions and attention
count; element-wise work, which is small beside them, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import num_samples
from pycoll.parallel.core.meta_model import on_meta
from pycoll.parallel.planner.trace import Operator, like, record, without_values
from pycoll.parallel.trainer.owner import owner_of

Pair = tuple[int, int]  # of the forward pass, and of the backward pass


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one forward and one backward pass over a sample batch.

    Attributes:
        forward: Operations of the forward pass.
        backward: Operations of the backward pass, without recomputation.
        by_layer: Forward and backward, by full name of the layer; a layer has what is within it.
        by_operator: Likewise, by operator, such as "aten.mm".
        samples: Number of samples of the batch.
    """

    forward: int
    backward: int
    by_layer: dict[str, Pair]
    by_operator: dict[str, Pair]
    samples: int

    @property
    def total(self) -> int:
        """Operations of both passes."""
        return self.forward + self.backward

    @property
    def per_sample(self) -> float:
        """Operations of both passes for one sample."""
        return self.total / max(self.samples, 1)

    def table(self, depth: int = 2) -> str:
        """Text with a line for each layer whose name has at most `depth` parts."""
        rows = [("model", (self.forward, self.backward))]
        rows += [(name, of) for name, of in self.by_layer.items() if name.count(".") < depth]
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            f"{name:{width}}  forward {forward:9.3g}  backward {backward:9.3g}  "
            f"{(forward + backward) / max(self.total, 1):4.0%}"
            for name, (forward, backward) in rows
        )


def flops(model: nn.Module, x: Any) -> Flops:
    """Counts the operations of a plain model. It needs no ranks, and no memory for values.

    Args:
        model: The model before `parallelize`; it may be on the device "meta". Its forward must not
            depend on values.
        x: A batch as for `model.step`: a tensor whose first dimension counts samples, or a tuple or
            dict of them; only shapes and dtypes matter.

    Returns:
        The counts. Causal attention counts as full attention, as in the literature.

    Raises:
        UsageError: The model has been parallelized, so that it is one rank's part.

    Cost: one pass through the model's Python code for each direction.
    """
    refuse_parts(model, "flops")
    with without_values():
        operators = record(on_meta(model), like(x)).operators
    counted = [operator for operator in operators if operator.flops]
    layers = [name for name, _ in model.named_modules() if name]
    within = {name: [o for o in counted if name in o.layers] for name in layers}
    return Flops(
        *_pair(counted),
        {name: _pair(of) for name, of in within.items() if of},
        {name: _pair(o for o in counted if o.name == name) for name in _names(counted)},
        num_samples(x),
    )


def refuse_parts(model: nn.Module, what: str) -> None:
    """Checks that a model is whole.

    Raises:
        UsageError: `parallelize` has made it one rank's part.
    """
    if any(owner_of(parameter) is not None for parameter in model.parameters()):
        raise UsageError(f"{what}: this is one rank's part of a model: count before pc.parallelize")


def _names(operators: Iterable[Operator]) -> list[str]:
    return list(dict.fromkeys(operator.name for operator in operators))


def _pair(operators: Iterable[Operator]) -> Pair:
    forward = backward = 0
    for operator in operators:
        forward += operator.flops * (operator.part == "forward")
        backward += operator.flops * (operator.part != "forward")
    return forward, backward


__all__ = ["Flops", "flops", "refuse_parts"]
