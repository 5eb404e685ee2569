"""A meta model: tensors with shapes but no storage, and a communicator that moves no data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pycoll.parallel.core.ledger import AxisGroup, Ledger
from pycoll.parallel.core.mesh_sizes import AXES


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


def meta_group(axis: str, rank: int, size: int, ledger: Ledger | None = None) -> AxisGroup:
    """An AxisGroup whose communicator moves no data; the ledger counts what it would move."""
    comm: Any = MetaCommunicator(rank, size)
    return AxisGroup.over(comm, axis, ledger)


class MetaMesh:
    """A mesh without ranks, seen from one place; its groups move no data."""

    def __init__(
        self, sizes: Mapping[str, int], place: Mapping[str, int], ledger: Ledger | None = None
    ) -> None:
        self._ledger = ledger
        self.sizes = {axis: sizes[axis] for axis in AXES}
        self._place = {axis: place.get(axis, 0) for axis in AXES}

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """The place along an axis."""
        return self._place[axis]

    def line(self, *axes: str) -> AxisGroup:
        """See Mesh."""
        key = [axis for axis in AXES if axis in axes]
        lengths = tuple(self.sizes[axis] for axis in key)
        rank = int(np.ravel_multi_index([self._place[axis] for axis in key], lengths))
        return meta_group("+".join(key), rank, math.prod(lengths), self._ledger)

    def line_of_dp(self, *axes: str) -> AxisGroup:
        """See Mesh."""
        return self.line("dp", *(axis for axis in axes if self.sizes[axis] > 1))


def on_meta(model: nn.Module, instead: Mapping[int, Any] | None = None) -> nn.Module:
    """Copies a module with fake parameters and buffers; call within a FakeTensorMode.

    `instead` has objects that take the place of others, by their ids.
    """
    memo: dict[int, Any] = dict(instead or {})
    for parameter in model.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


class Saved:
    """Counts bytes that autograd saves within the context, each storage once, and others' notes.

    Attributes:
        nbytes: Bytes of storages that do not belong to `known` tensors.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._kept: list[Any] = []  # keeps addresses from being reused
        self.nbytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.note, lambda x: x)

    def note(self, tensor: Tensor) -> Tensor:
        """Counts the storage of a tensor that is kept."""
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


__all__ = ["MetaCommunicator", "MetaMesh", "Saved", "on_meta", "meta_group"]
