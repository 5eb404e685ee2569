"""Collectives that gradients flow through, in conjugate pairs.

A tensor is whole if all ranks of a group hold the same value, and a part if they differ. The
gradient of a whole tensor is whole, and that of a part is a part; each function's backward is its
conjugate's forward. Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (f and g); Korthikanti
et al., Reducing Activation Recomputation, arXiv:2205.05198 (the sequence forms).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import share, share_sizes


def copy_to(x: Tensor, group: AxisGroup) -> Tensor:
    """Megatron's f: returns the whole input; backward adds up the ranks' gradients."""
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: AxisGroup) -> Tensor:
    """Megatron's g: returns the sum of all ranks' tensors, whole."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def scatter_to(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's share of a whole tensor along `dim`; shares may differ by one."""
    return x if group.size == 1 else _ScatterTo.apply(x, group, dim)


def gather_from(x: Tensor, group: AxisGroup, dim: int, size: int) -> Tensor:
    """Gathers the shares into a whole tensor, `size` long along `dim`; its consumers are whole."""
    return x if group.size == 1 else _GatherFrom.apply(x, group, dim, size)


def gather_to(x: Tensor, group: AxisGroup, dim: int, size: int) -> Tensor:
    """Like `gather_from`, but its consumers differ between ranks: backward adds up gradients."""
    return x if group.size == 1 else _GatherTo.apply(x, group, dim, size)


def reduce_scatter_from(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's share of the sum of all ranks' tensors."""
    return x if group.size == 1 else _ReduceScatterFrom.apply(x, group, dim)


def all_to_all(x: Tensor, group: AxisGroup, there: list[int], here: list[int]) -> Tensor:
    """Exchanges rows: `there[r]` to rank r, `here[r]` from it; backward returns the gradients."""
    return _AllToAll.apply(x, group, there, here)  # type: ignore[no-any-return]


def all_gather(x: Tensor, group: AxisGroup, dim: int, size: int) -> Tensor:
    """Gathers shares along `dim`, without autograd."""
    front = x.detach().movedim(dim, 0).contiguous()
    row = front[0].numel() if len(front) else front.flatten(1).shape[1]
    gathered = group.all_gather(front, [row * n for n in share_sizes(size, group.size)])
    return gathered.view(size, *front.shape[1:]).movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's share along `dim` of the sum, without autograd."""
    front = x.detach().movedim(dim, 0).contiguous()
    row = front[0].numel()
    mine = group.reduce_scatter(front, [row * n for n in share_sizes(len(front), group.size)])
    return mine.view(-1, *front.shape[1:]).movedim(0, dim).contiguous()


def _sum(x: Tensor, group: AxisGroup) -> Tensor:
    """Sums a copy: autograd may still need `x`."""
    return group.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))


def _share(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    start, stop = share(x.shape[dim], group.size, group.rank)
    return x.narrow(dim, start, stop - start).contiguous()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return _share(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grad, ctx.group, ctx.dim, ctx.size), None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _share(grad, ctx.group, ctx.dim), None, None, None


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None, None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grad, ctx.group, ctx.dim, ctx.size), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, there: list[int], here: list[int]) -> Tensor:
        ctx.group, ctx.counts = group, (here, there)
        return group.all_to_all(x, there, here)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.group.all_to_all(grad, *ctx.counts), None, None, None


__all__ = [
    "all_gather",
    "all_to_all",
    "copy_to",
    "gather_from",
    "gather_to",
    "reduce_from",
    "reduce_scatter",
    "reduce_scatter_from",
    "scatter_to",
]
