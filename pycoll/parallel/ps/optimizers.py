"""Optimizers on servers: those of torch, for whole tensors and for touched rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from pycoll.errors import UsageError

# Makes an optimizer of one tensor; the second argument says whether its gradients are sparse.
MakeOptimizer = Callable[[list[Tensor], bool], optim.Optimizer]


def SGD(lr: float, **options: Any) -> MakeOptimizer:
    """torch's SGD, with its options."""
    return lambda tensors, sparse: optim.SGD(tensors, lr=lr, **options)


def Adagrad(lr: float, **options: Any) -> MakeOptimizer:
    """torch's Adagrad, with its options; touched rows only if gradients are sparse."""
    return lambda tensors, sparse: optim.Adagrad(tensors, lr=lr, **options)


def Adam(lr: float, **options: Any) -> MakeOptimizer:
    """torch's Adam, with its options; for sparse gradients SparseAdam, which is lazy."""

    def make(tensors: list[Tensor], sparse: bool) -> optim.Optimizer:
        return (optim.SparseAdam if sparse else optim.Adam)(tensors, lr=lr, **options)

    return make


class ProximalSGD(optim.Optimizer):
    """SGD for a loss plus l1 |w|: w becomes shrink(w - lr g, lr l1), exactly 0 for small ones.

    Touched rows only, if gradients are sparse.

    Source: Duchi & Singer 2009, "Efficient Online and Batch Learning using Forward Backward
        Splitting", JMLR.
    """

    def __init__(self, params: Any, lr: float, l1: float) -> None:
        if l1 < 0:
            raise UsageError(f"ProximalSGD: l1={l1}, expected 0 or more")
        super().__init__(params, {"lr": lr, "l1": l1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes a step; `closure` is not called."""
        for group in self.param_groups:
            lr, limit = group["lr"], group["lr"] * group["l1"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                if w.grad.is_sparse:
                    grad = w.grad.coalesce()
                    rows = grad.indices()[0]
                    stepped = w[rows] - lr * grad.values()
                    w[rows] = torch.nn.functional.softshrink(stepped, limit)
                else:
                    w.copy_(torch.nn.functional.softshrink(w - lr * w.grad, limit))


def Proximal(lr: float, l1: float) -> MakeOptimizer:
    """`ProximalSGD`: SGD whose weights of little use become 0, for the filter KKT."""
    return lambda tensors, sparse: ProximalSGD(tensors, lr, l1)


def optimizer_for(
    optimizer: MakeOptimizer | Mapping[str, MakeOptimizer], table: str
) -> MakeOptimizer:
    """The optimizer of a table: one for all, or one by the table's name.

    Raises:
        UsageError: There is none for the table.
    """
    if not isinstance(optimizer, Mapping):
        return optimizer
    if table not in optimizer:
        raise UsageError(
            f"parameter server: table {table!r} has no optimizer, there are such for "
            f"{', '.join(map(repr, optimizer)) or 'no table'}"
        )
    return optimizer[table]


__all__ = ["Adagrad", "Adam", "MakeOptimizer", "Proximal", "ProximalSGD", "SGD", "optimizer_for"]
