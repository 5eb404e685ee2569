"""A rank on paper: tensors that have shapes and no bytes, and a communicator that moves none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.parallel.ledger import Ledger, Line


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


def paper_line(axis: str, rank: int, size: int) -> Line:
    """A line along an axis on which nobody else is."""
    comm: Any = PaperCommunicator(rank, size)
    return Line(axis, comm, Ledger())


def on_paper(model: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are fake; within a FakeTensorMode."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


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


__all__ = ["PaperCommunicator", "Saved", "on_paper", "paper_line"]
