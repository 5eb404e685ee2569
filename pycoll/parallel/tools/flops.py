"""Floating-point operations of a model, counted by tracing it without values.

A multiplication and an addition are two operations. Matrix products, convolutions and attention
count; element-wise work, which is small beside them, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import as_call, num_samples
from pycoll.parallel.core.specs import replace, tensors_in
from pycoll.parallel.tools.meta_model import on_meta
from pycoll.parallel.trainer.plain_loop import OF_PARAMETER

Pair = tuple[int, int]  # of the forward pass, and of the backward pass
_ALL = "Global"  # torch's name of the whole model


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
    if any(hasattr(parameter, OF_PARAMETER) for parameter in model.parameters()):
        raise UsageError("flops: this is one rank's part of a model: count before pc.parallelize")

    def like(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    counter = FlopCounterMode(display=False)
    # The kernels for attention on a CPU have no count; as plain products, they have the same one.
    with FakeTensorMode(), torch.device("cpu"), sdpa_kernel(SDPBackend.MATH):
        made = on_meta(model)
        args, kwargs = as_call(replace(x, Tensor, like))
        with counter:  # around both passes, so that the backward pass knows its layers
            output = made(*args, **kwargs)
            forward = counter.get_flop_counts()
            floating = [y for y in tensors_in(output) if y.requires_grad and y.is_floating_point()]
            if floating:
                # Through a sum: the pass into the last layer is noticed on its way there only.
                torch.stack([y.sum() for y in floating]).sum().backward()
            both = counter.get_flop_counts()

    def pair(layer: str, operator: str = "") -> Pair:
        before = _sum(forward, layer, operator)
        return before, _sum(both, layer, operator) - before

    name = type(model).__name__
    layers = [layer for layer, _ in model.named_modules() if layer]
    found = {layer: pair(f"{name}.{layer}") for layer in layers}
    return Flops(
        *pair(_ALL),
        {layer: of for layer, of in found.items() if any(of)},
        {op: pair(_ALL, op) for op in map(str, both.get(_ALL, {}))},
        num_samples(x),
    )


def _sum(counts: Mapping[str, Mapping[Any, int]], module: str, operator: str = "") -> int:
    """Sum of a module's counts by operator; `operator`: of this one alone."""
    of_module = counts.get(module, {}).items()
    return sum(count for op, count in of_module if not operator or str(op) == operator)


__all__ = ["Flops", "flops"]
