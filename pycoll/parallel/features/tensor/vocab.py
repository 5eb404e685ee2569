"""A vocabulary shared out over ranks: embedding, and cross-entropy without gathered logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.logits import MARK


def embed(layer: nn.Embedding, start: int, group: AxisGroup, ids: Tensor) -> Tensor:
    """Looks up the ids whose rows this rank holds; the other ranks add theirs."""
    here = (ids >= start) & (ids < start + layer.num_embeddings)
    rows = functional.embedding(torch.where(here, ids - start, 0), layer.weight)
    return collectives.reduce_from(rows * here.unsqueeze(-1), group)


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The sum of cross-entropies and the number of targets: a loss for `model.step`.

    Logits of a layer with style "vocab" are not gathered: for each target, ranks exchange a
    maximum, a sum of exponentials and the target's logit.

    Args:
        logits: Shape [..., classes], floating; whole, or this rank's part. Those of 16 bits are
            summed in float32.
        target: Shape [...], integers.
        ignore_index: The target that is ignored.

    Returns:
        The sum, a scalar that gradients flow through, and the count, an int64 scalar.

    Cost: for parts, one all_reduce of one number and one of two numbers per target.
    """
    counted = target != ignore_index
    labels = torch.where(counted, target, 0)
    part = getattr(logits, MARK, None)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # sums of short floats are off by 1 %
    if part is not None:
        (start, _), _, group = part
        losses = _CrossEntropy.apply(logits, labels, start, group)
    else:
        losses = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), reduction="none"
        ).view(labels.shape)
    return (losses * counted).sum(), counted.sum()


# The loss takes parts, so `model.step` does not gather them.
cross_entropy.takes_parts = True  # type: ignore[attr-defined]


class _CrossEntropy(torch.autograd.Function):
    """Losses from a part of the classes; the result is whole, in the shape of the labels."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: AxisGroup) -> Tensor:
        if logits.shape[-1]:
            largest = logits.detach().amax(-1)
        else:
            largest = logits.new_full(labels.shape, -torch.inf)
        largest = group.all_reduce(largest.contiguous(), "max")
        exponentials = (logits - largest.unsqueeze(-1)).exp()
        here = (labels >= start) & (labels < start + logits.shape[-1])
        index = torch.where(here, labels - start, 0).unsqueeze(-1)
        sums = torch.stack([exponentials.sum(-1), torch.zeros_like(largest)])
        if logits.shape[-1]:
            sums[1] = (logits.gather(-1, index).squeeze(-1) - largest) * here
        total, chosen = group.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, here)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        shares, index, here = ctx.saved_tensors
        result = shares * grad.unsqueeze(-1)
        if result.shape[-1]:
            result.scatter_add_(-1, index, (-grad * here).unsqueeze(-1))
        return result, None, None, None


__all__ = ["cross_entropy", "embed"]
