"""What an operator of torch is: its formula of operations, and whether it moves bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

# Operators that read and write nothing.
_FREE = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty),
    *(torch.ops.aten.empty_strided, torch.ops.aten.new_empty_strided),
    *(torch.ops.aten._unsafe_view, torch.ops.aten.detach),
}


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products for each head; causal attention counts as full attention."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The products of the forward pass count twice; what the kernel computes again does not."""
    return 2 * _attention(query, key, value)


# Number of operations, by operator; torch has no formula for attention on a CPU.
_COUNTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def counter_of(func: Any) -> Callable[..., int] | None:
    """The function that counts the operations of an operator's call; None: it has none."""
    return _COUNTS.get(getattr(func, "_overloadpacket", None))


@functools.cache
def returns_tensors(func: Any) -> bool:
    """Whether an operator returns tensors, and not only a shape or a device."""
    return any("Tensor" in str(one.type) for one in func._schema.returns)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operator returns another view of its input."""
    returns = func._schema.returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


@functools.cache
def moves_nothing(func: Any) -> bool:
    """Whether an operator returns a view, or memory that it does not write."""
    return _is_view(func) or func._overloadpacket in _FREE


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether an operator without a formula is made of others for every device."""
    if func._overloadpacket in _COUNTS or not hasattr(func, "decompose"):
        return False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), key
    )


__all__ = ["counter_of", "is_composite", "moves_nothing", "returns_tensors"]
