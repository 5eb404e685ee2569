"""A meta model: tensors with shapes but no storage, and a communicator that moves no data."""

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
class MetaCommunicator:
    """Returns the output array of each collective, or its input, unchanged.

    Attributes:
        rank: The rank whose part is computed.
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
    """A completed work."""

    def wait(self) -> None:
        """Returns at once."""


def meta_group(axis: str, rank: int, size: int) -> AxisGroup:
    """An AxisGroup whose communicator moves no data."""
    comm: Any = MetaCommunicator(rank, size)
    return AxisGroup(axis, comm, Ledger())


def on_meta(model: nn.Module) -> nn.Module:
    """Copies a module with fake parameters and buffers; call within a FakeTensorMode."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def without_values(model: nn.Module) -> None:
    """Makes a model compute without values, in place: only shapes of dropout and routing matter."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = partial(_drop, module)  # type: ignore[method-assign]
        if isinstance(module, Experts):
            module.forward = partial(_route, module)  # type: ignore[method-assign]


def _drop(module: nn.Dropout, x: Tensor) -> Tensor:
    """Saves what keyed dropout saves: a mask in the dtype of its input."""
    return x * torch.empty_like(x) / 0.5 if module.training else x


def _route(experts: Experts, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Routes tokens evenly to all experts."""
    order = indices.flatten().argsort()
    rows = order // indices.shape[1]
    parts = tokens[rows].split(share_sizes(len(rows), len(experts)))
    made = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    made = made * weights.flatten()[order].unsqueeze(-1)
    return made.new_zeros((len(tokens), *made.shape[1:])).index_add(0, rows, made)


class Saved:
    """Counts bytes that autograd saves within the context, each storage once.

    Attributes:
        nbytes: Bytes of storages that do not belong to `known` tensors.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._kept: list[Any] = []  # keeps addresses from being reused
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


__all__ = ["MetaCommunicator", "Saved", "on_meta", "meta_group"]
