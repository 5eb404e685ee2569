"""The tables of a worker: a model's weights as blocks, and sparse tables that layers look up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.devices import CPU
from pycoll.parallel.ps.keys import HashRing, Layout, Table
from pycoll.parallel.ps.optimizer_state import State
from pycoll.parallel.replicas.weights import Weights

BLOCK = 1024  # weights of a model in one key


class DenseTable:
    """Parameters as rows of BLOCK weights, the last one filled up with zeros.

    Messages are in CPU memory. Parameters on a device are gathered there, so that one copy brings
    all weights to the CPU or back.

    Attributes:
        pulled: The weights that came with the last pull, [rows, BLOCK], on the CPU.
        rate: Learning rate that goes with a push; NaN: the server's.
    """

    def __init__(self, number: int, name: str, parameters: Iterable[Tensor], ring: HashRing):
        self._parameters = [p for p in parameters if p.requires_grad]
        self._weights = Weights(self._parameters)
        count = self._weights.count
        if not count or not self._weights.dtype.is_floating_point:
            raise UsageError(f"register: {name!r} has no floating parameters that learn")
        rows = -(-count // BLOCK)
        self.table = Table(number, name, rows, BLOCK, self._weights.dtype, sparse=False)
        self.layout = Layout(self.table, ring)
        self.pulled = torch.zeros(rows, BLOCK, dtype=self.table.dtype)
        self._gradient = torch.zeros(rows, BLOCK, dtype=self.table.dtype)
        is_on_cpu = self._weights.device.type == CPU
        self._on_device = None if is_on_cpu else self._weights.new(rows * BLOCK - count)
        self.rate = float("nan")

    def weights(self) -> Tensor:
        """The parameters, [rows, BLOCK], on the CPU."""
        flat = self._gathered(self.pulled)
        self._weights.read(flat)
        self._to_cpu(self.pulled)
        return self.pulled

    def write(self) -> None:
        """Sets the parameters to what `pulled` contains."""
        flat = self._gathered(self.pulled)
        if self._on_device is not None:
            flat.copy_(self.pulled.view(-1))
        self._weights.write(flat)

    def of_parameters(self, state: State) -> dict[Tensor, State]:
        """A state of the table's optimizer as one of torch has it, for each parameter."""
        sizes = [p.numel() for p in self._parameters]
        found: dict[Tensor, State] = {p: {} for p in self._parameters if state}
        for key, value in state.items():
            if value.dim() == 0:
                for p in self._parameters:
                    found[p][key] = value.clone()
                continue
            parts = value.view(-1)[: sum(sizes)].split(sizes)
            for p, part in zip(self._parameters, parts, strict=True):
                found[p][key] = part.view_as(p).to(p.device, copy=True)
        return found

    def as_rows(self, found: Mapping[Tensor, Mapping[str, Any]]) -> State:
        """The inverse of `of_parameters`; zeros for parameters of which nothing is found."""
        learned = [(p, found.get(p, {})) for p in self._parameters]
        state: State = {}
        # Where a parameter has dimensions, a number for all weights cannot be taken for its own.
        for p, of_one in sorted(learned, key=lambda one: one[0].dim() == 0):
            for key, value in of_one.items():
                if not isinstance(value, Tensor) or key in state:
                    continue
                if value.dim() == 0 and (p.dim() or key == "step"):
                    state[key] = value.cpu()
                    continue
                flat = torch.zeros(self.table.rows * BLOCK, dtype=self.table.dtype)
                Weights(other.get(key, torch.zeros_like(q)) for q, other in learned).read(flat)
                state[key] = flat.view(self.table.rows, BLOCK)
        return state

    def take_gradient(self) -> tuple[Tensor, Tensor]:
        """All rows, and their gradients, on the CPU; those of the parameters are then None."""
        flat, place = self._gathered(self._gradient), 0
        for p in self._parameters:
            part = flat[place : place + p.numel()]
            part.zero_() if p.grad is None else part.copy_(p.grad.reshape(-1))
            p.grad, place = None, place + p.numel()
        self._to_cpu(self._gradient)
        return torch.arange(self.table.rows), self._gradient

    def _gathered(self, rows: Tensor) -> Tensor:
        """The vector beside the parameters that stands for `rows`: on the CPU, its own memory."""
        return rows.view(-1) if self._on_device is None else self._on_device

    def _to_cpu(self, rows: Tensor) -> None:
        if self._on_device is not None:
            rows.view(-1).copy_(self._on_device)


@dataclass(slots=True)
class SparseTable:
    """Rows on the servers, of which a worker pulls those that it needs.

    Attributes:
        leaves: Rows that were pulled since the last push, on the CPU, and their values where they
            are looked up, whose `.grad` autograd fills.
    """

    table: Table
    layout: Layout
    leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rate: float = float("nan")

    def values(self, rows: Tensor) -> Tensor:
        """The values that were pulled for rows, 0 for others: [len(rows), dim]."""
        found = torch.zeros(len(rows), self.table.dim, dtype=self.table.dtype)
        for known, values in self.leaves:
            places = torch.searchsorted(known, rows).clamp(max=max(len(known) - 1, 0))
            if len(known):
                same = known[places] == rows
                found[same] = values.detach().cpu()[places[same]]
        return found

    def gradient(self) -> tuple[Tensor, Tensor]:
        """Rows with gradients, ascending, and their sums, [n, dim], on the CPU."""
        learned = [(rows, x.grad.cpu()) for rows, x in self.leaves if x.grad is not None]
        if not learned:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.table.dim)
        if len(learned) == 1:
            return learned[0][0], learned[0][1]
        rows, inverse = torch.unique(torch.cat([of for of, _ in learned]), return_inverse=True)
        sums = torch.zeros(len(rows), self.table.dim, dtype=self.table.dtype)
        sums.index_add_(0, inverse, torch.cat([grad for _, grad in learned]))
        return rows, sums


class Embedding(nn.Module):
    """Looks up rows of a sparse table on the servers, and pulls the touched ones alone.

    Made by `Worker.embedding`. Its gradient goes to the servers with the next `Worker.push`.

    Attributes:
        table: The table.
    """

    def __init__(self, table: SparseTable, pull: Callable[[SparseTable, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self._pull = table, pull

    def forward(self, indices: Tensor) -> Tensor:
        """The rows of indices.

        Args:
            indices: [...] int64.

        Returns:
            [..., dim], of the table's dtype, where the indices are.

        Raises:
            UsageError: An index is no row of the table.

        Cost: a pull of the different rows: 8 bytes for each key, and its values; on a device also a
            copy of the keys to the CPU, and one of the values back.
        """
        rows, inverse = torch.unique(indices, return_inverse=True)
        rows = rows.cpu()
        values = self._pull(self.table, rows).to(indices.device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            self.table.leaves.append((rows, values))
        return values[inverse]


__all__ = ["BLOCK", "DenseTable", "Embedding", "SparseTable"]
