"""The rows of one part of a table on one server, with their optimizer: a state machine.

All holders of a part make the same changes in the same order, so a copy is equal to the bits. The
first living holder decides (`Server`); the others do what it has decided.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pycoll.parallel.core.random import normal
from pycoll.parallel.ps.keys import Part, Table
from pycoll.parallel.ps.messages import DROP, HOLD, Message
from pycoll.parallel.ps.optimizer_state import State
from pycoll.parallel.ps.optimizers import MakeOptimizer
from pycoll.parallel.ps.snapshot import pack, unpack


@dataclass(frozen=True, slots=True)
class Gradient:
    """A worker's gradient of some rows.

    Attributes:
        places: Places of the rows in the shard, ascending, [n] int64; None: all rows.
        values: [n, dim], of the table's dtype.
        weight: Weight in the mean of a step.
        rate: Learning rate; NaN: that of the server's optimizer.
    """

    places: Tensor | None
    values: Tensor
    weight: float = 1.0
    rate: float = float("nan")


class Shard:
    """Rows and their optimizer.

    Attributes:
        lock: Held while rows are read or changed, and until the copies have the change.
        changed: Notified when `version` changes.
        version: Number of updates; in synchronous modes, of steps.
        held: Gradients of the step that is not complete yet, and of later ones, by step and worker.
        last: Number of the last push of each worker: a push that comes twice is made once.
        pulled: Version that each worker has pulled last.
        is_ready: The rows have their first values.
        holders: Servers that have the shard, as far as this one knows; the dead ones, too.
    """

    def __init__(self, table: Table, part: Part, make_optimizer: MakeOptimizer) -> None:
        self.table, self.part = table, part
        self.values = nn.Parameter(torch.zeros(len(part.rows), table.dim, dtype=table.dtype))
        self.optimizer = make_optimizer([self.values], table.sparse)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = 0
        self.held: dict[int, dict[int, Gradient]] = {}
        self.last: dict[int, int] = {}
        self.pulled: dict[int, int] = {}
        self.is_ready = False
        self.holders = set(part.owners)

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        """Sets all rows, [rows, dim]."""
        with self.lock:
            self.values.copy_(values)

    def begin(self) -> None:
        """The rows have their first values: workers may pull and push them."""
        with self.lock:
            self.is_ready = True
            self.changed.notify_all()

    @torch.no_grad()
    def read(self, places: Tensor | None) -> Tensor:
        """A copy of some rows, or of all."""
        values = self.values.detach()
        return values.clone() if places is None else values[places]

    def take(self, push: Message, gradient: Gradient, factor: float) -> None:
        """Does what has been decided on a push."""
        self.last[push.worker] = push.number
        if factor == HOLD:
            self.held.setdefault(push.clock, {})[push.worker] = gradient
        elif factor != DROP:
            self._step(gradient, factor)
            self._go_to(self.version + 1)

    def apply_held(self, version: int) -> None:
        """Steps by the weighted mean of the gradients held for this step, in order of workers."""
        held = sorted(self.held.pop(self.version, {}).items())
        if held:
            self._step(self._mean([gradient for _, gradient in held]))
        self._go_to(version)

    def optimizer_state(self) -> State:
        """A copy of what the optimizer keeps of the rows; empty before its first step."""
        with self.lock:
            found = self.optimizer.state.get(self.values, {})
            return {key: x.clone() for key, x in found.items() if isinstance(x, Tensor)}

    def put_optimizer_state(self, state: State) -> None:
        """Continues from what `optimizer_state` returned."""
        with self.lock:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})

    def state(self) -> Tensor:
        """All that another holder needs to go on, as bytes; the caller holds the lock."""
        held = {
            step: {w: (g.places, g.values, g.weight, g.rate) for w, g in of.items()}
            for step, of in self.held.items()
        }
        return pack(
            {
                "values": self.values.detach(),
                "optimizer": self.optimizer.state_dict(),
                "version": self.version,
                "held": held,
                "last": self.last,
                "pulled": self.pulled,
                "holders": sorted(self.holders),
            }
        )

    @torch.no_grad()
    def install(self, state: Tensor) -> None:
        """Becomes what `state` of another holder has returned."""
        found = unpack(state, "a server")
        self.optimizer.load_state_dict(found["optimizer"])
        self.version, self.last, self.pulled = (found[x] for x in ("version", "last", "pulled"))
        self.held = {
            step: {worker: Gradient(*gradient) for worker, gradient in of.items()}
            for step, of in found["held"].items()
        }
        self.holders = set(found["holders"])
        self.set(found["values"])
        self.begin()

    def _go_to(self, version: int) -> None:
        self.version = version
        self.changed.notify_all()

    def _step(self, gradient: Gradient, factor: float = 1.0) -> None:
        """Steps the rows of a gradient, with a factor of the learning rate."""
        if not len(gradient.values):
            return
        self.values.grad = self._as_grad(gradient)
        (group,) = self.optimizer.param_groups
        own_rate = group["lr"]
        group["lr"] = factor * (own_rate if math.isnan(gradient.rate) else gradient.rate)
        self.optimizer.step()
        group["lr"], self.values.grad = own_rate, None

    def _as_grad(self, gradient: Gradient) -> Tensor:
        """As torch's optimizers take it: dense, or sparse and coalesced."""
        if self.table.sparse:
            places = gradient.places
            if places is None:
                places = torch.arange(len(self.values))
            size = tuple(self.values.shape)
            return torch.sparse_coo_tensor(
                places[None], gradient.values, size, is_coalesced=True, check_invariants=False
            )
        if gradient.places is None:
            return gradient.values
        grad = torch.zeros_like(self.values)
        grad[gradient.places] = gradient.values
        return grad

    def _mean(self, gradients: list[Gradient]) -> Gradient:
        total = sum(gradient.weight for gradient in gradients) or 1.0
        rate = gradients[0].rate
        if all(gradient.places is None for gradient in gradients):
            mean = torch.zeros_like(self.values)
            for gradient in gradients:
                mean.add_(gradient.values, alpha=gradient.weight / total)
            return Gradient(None, mean, rate=rate)
        everything = torch.arange(len(self.values))
        of_each = [everything if g.places is None else g.places for g in gradients]
        places, inverse = torch.unique(torch.cat(of_each), return_inverse=True)
        mean = torch.zeros(len(places), self.table.dim, dtype=self.table.dtype)
        start = 0
        for gradient, mine in zip(gradients, of_each, strict=True):
            here = inverse[start : start + len(mine)]  # without repetitions
            mean[here] += gradient.values * (gradient.weight / total)
            start += len(mine)
        return Gradient(places, mean, rate=rate)


def first_values(table: Table, part: Part, seed: int) -> Tensor:
    """Normal numbers by place: the same whatever the servers are. [rows of the part, dim]."""
    chunk = max(1, (1 << 18) // table.dim)
    made = torch.zeros(len(part.rows), table.dim, dtype=table.dtype)
    for first in range(0, table.rows, chunk):
        size = min(chunk, table.rows - first)
        low, high = np.searchsorted(part.rows, [first, first + size])
        if low == high:
            continue
        name = f"ps {seed} {table.name}"
        drawn = normal(name, (size, table.dim), 0.0, table.std, start=first * table.dim)
        made[low:high] = drawn[torch.from_numpy(part.rows[low:high] - first)].to(table.dtype)
    return made


__all__ = ["Gradient", "Shard", "first_values"]
