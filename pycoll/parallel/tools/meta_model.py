"""A rank on paper: tensors that have shapes and no bytes, and a communicator that moves none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.parallel.core.ledger import AxisGroup, Ledger
from pycoll.parallel.core.placement import share_sizes
from pycoll.parallel.experts import Experts


@dataclass(frozen=True, slots=True)
class PaperCommunicator:
    """Answers each collective with what it was given to write to, or with its input.

    Attributes:
        rank: Which rank's part it is.
        size: Number of ranks.
    """

    rank: int
    size: int

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def answer(
            x: Any = None, *args: Any, out: Any = None, async_op: bool = False, **kwargs: Any
        ) -> Any:
            return _Done() if async_op else x if out is None else out

        return answer


class _Done:
    """A work that has ended."""

    def wait(self) -> None:
        """Waits for nothing."""


def meta_group(axis: str, rank: int, size: int) -> AxisGroup:
    """A line along an axis on which nobody else is."""
    comm: Any = PaperCommunicator(rank, size)
    return AxisGroup(axis, comm, Ledger())


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are fake; within a FakeTensorMode."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def without_values(model: nn.Module) -> None:
    """Has a model compute without values, in place: of dropout and routing, only shapes count."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = partial(_drop, module)  # type: ignore[method-assign]
        if isinstance(module, Experts):
            module.forward = partial(_route, module)  # type: ignore[method-assign]


def _drop(module: nn.Dropout, x: Tensor) -> Tensor:
    """Keeps what keyed dropout keeps: a mask in the dtype of its input."""
    return x * torch.empty_like(x) / 0.5 if module.training else x


def _route(experts: Experts, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """As if tokens asked all experts alike."""
    order = indices.flatten().argsort()
    rows = order // indices.shape[1]
    parts = tokens[rows].split(share_sizes(len(rows), len(experts)))
    made = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    made = made * weights.flatten()[order].unsqueeze(-1)
    return made.new_zeros((len(tokens), *made.shape[1:])).index_add(0, rows, made)


class Saved:
    """Bytes that autograd keeps of what runs within the context, each storage once.

    Attributes:
        nbytes: Of storages that are not those of `known` tensors.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._kept: list[Any] = []  # so that no other storage takes the place of one
        self.nbytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda x: x)

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(storage)
            self.nbytes += storage.nbytes()
        return tensor

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


__all__ = ["PaperCommunicator", "Saved", "on_meta", "meta_group"]
