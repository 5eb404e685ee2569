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


def copy_to(x: Tensor, line: AxisGroup) -> Tensor:
    """Megatron's f: returns the whole input; backward adds up the ranks' gradients."""
    return x if line.size == 1 else _CopyTo.apply(x, line)


def reduce_from(x: Tensor, line: AxisGroup) -> Tensor:
    """Megatron's g: returns the sum of all ranks' tensors, whole."""
    return x if line.size == 1 else _ReduceFrom.apply(x, line)


def scatter_to(x: Tensor, line: AxisGroup, dim: int) -> Tensor:
    """This rank's share of a whole tensor along `dim`; shares may differ by one."""
    return x if line.size == 1 else _ScatterTo.apply(x, line, dim)


def gather_from(x: Tensor, line: AxisGroup, dim: int, size: int) -> Tensor:
    """Gathers the shares into a whole tensor, `size` long along `dim`; its consumers are whole."""
    return x if line.size == 1 else _GatherFrom.apply(x, line, dim, size)


def gather_to(x: Tensor, line: AxisGroup, dim: int, size: int) -> Tensor:
    """Like `gather_from`, but its consumers differ between ranks: backward adds up gradients."""
    return x if line.size == 1 else _GatherTo.apply(x, line, dim, size)


def reduce_scatter_from(x: Tensor, line: AxisGroup, dim: int) -> Tensor:
    """This rank's share of the sum of all ranks' tensors."""
    return x if line.size == 1 else _ReduceScatterFrom.apply(x, line, dim)


def all_to_all(x: Tensor, line: AxisGroup, there: list[int], here: list[int]) -> Tensor:
    """Exchanges rows: `there[r]` to rank r, `here[r]` from it; backward returns the gradients."""
    return _AllToAll.apply(x, line, there, here)  # type: ignore[no-any-return]


def all_gather(x: Tensor, line: AxisGroup, dim: int, size: int) -> Tensor:
    """Gathers shares along `dim`, without autograd."""
    front = x.detach().movedim(dim, 0).contiguous()
    row = front[0].numel() if len(front) else front.flatten(1).shape[1]
    gathered = line.all_gather(front, [row * n for n in share_sizes(size, line.size)])
    return gathered.view(size, *front.shape[1:]).movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, line: AxisGroup, dim: int) -> Tensor:
    """This rank's share along `dim` of the sum, without autograd."""
    front = x.detach().movedim(dim, 0).contiguous()
    row = front[0].numel()
    mine = line.reduce_scatter(front, [row * n for n in share_sizes(len(front), line.size)])
    return mine.view(-1, *front.shape[1:]).movedim(0, dim).contiguous()


def _sum(x: Tensor, line: AxisGroup) -> Tensor:
    """Sums a copy: autograd may still need `x`."""
    return line.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))


def _share(x: Tensor, line: AxisGroup, dim: int) -> Tensor:
    start, stop = share(x.shape[dim], line.size, line.rank)
    return x.narrow(dim, start, stop - start).contiguous()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.line), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup) -> Tensor:
        return _sum(x, line)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup, dim: int) -> Tensor:
        ctx.line, ctx.dim, ctx.size = line, dim, x.shape[dim]
        return _share(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grad, ctx.line, ctx.dim, ctx.size), None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup, dim: int, size: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return all_gather(x, line, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _share(grad, ctx.line, ctx.dim), None, None, None


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup, dim: int, size: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return all_gather(x, line, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return reduce_scatter(grad, ctx.line, ctx.dim), None, None, None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup, dim: int) -> Tensor:
        ctx.line, ctx.dim, ctx.size = line, dim, x.shape[dim]
        return reduce_scatter(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grad, ctx.line, ctx.dim, ctx.size), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: AxisGroup, there: list[int], here: list[int]) -> Tensor:
        ctx.line, ctx.counts = line, (here, there)
        return line.all_to_all(x, there, here)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.line.all_to_all(grad, *ctx.counts), None, None, None


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
