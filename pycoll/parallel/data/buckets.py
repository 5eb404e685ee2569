"""Buckets: gradients of several parameters, reduced by one collective while backward goes on.

What ZeRO level shares out is decided here, and in one place: 0 nothing, 1 the optimizer's state,
2 gradients as well, 3 parameters as well. A bucket is one flat array; the share of rank r is its
r-th equal part, so that a part of a parameter may be in one share and the rest in the next.
Source: Rajbhandari et al., ZeRO, arXiv:1910.02054; Li et al., PyTorch Distributed,
arXiv:2006.15704.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pycoll.parallel.core.ledger import AxisGroup, Started


@dataclass(slots=True)
class Slot:
    """A parameter's place in its bucket.

    Attributes:
        name: Full name of the parameter.
        parameter: Itself.
        offset: Of its first element in the flat array.
        shape: Of the parameter.
        ready: Whether this backward pass has made its gradient.
        filled: Whether the bucket has a gradient of it.
    """

    name: str
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    ready: bool = False
    filled: bool = False

    @property
    def count(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat array."""
        return flat[self.offset : self.offset + self.count].view(self.shape)


class Bucket:
    """Some parameters of a rank, their gradients, and the shares of both.

    Attributes:
        slots: The parameters.
        line: The ranks whose gradients are added up.
        level: Of ZeRO.
        pending: How many gradients this backward pass has still to make.
    """

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], line: AxisGroup, level: int, main: torch.dtype
    ) -> None:
        self.line, self.level = line, level
        self.slots: list[Slot] = []
        offset = 0
        for name, parameter in named:
            self.slots.append(Slot(name, parameter, offset, parameter.shape))
            offset += parameter.numel()
        self.pending = len(self.slots)
        num_shares = line.size if level else 1
        self._share = share_length(offset, num_shares)
        self._count = self._share * num_shares
        self._dtype, self._main = named[0][1].dtype, main
        self._gradients: Tensor | None = None  # of all parameters
        self._reducing: Started | None = None
        self._sums: Tensor | None = None  # the share's, where gradients are shared out
        self._full: Tensor | None = None  # all parameters, where shares are put together
        self._mine: Tensor | None = None  # the share of the parameters, where they are shared out
        self._master: Tensor | None = None  # the share in the main dtype, where that is another
        self._users = 0  # of the full parameters
        if level:
            self._flatten()
        if main != self._dtype:
            self._master = (self._part() if level else self._flat_copy()).to(main)

    # Parameters.

    def _flatten(self) -> None:
        """Parameters become views of one array, of which ZeRO 3 keeps this rank's share."""
        # Memory that the others reach without a copy, where it stays.
        self._full = (
            torch.zeros(self._count, dtype=self._dtype)
            if self.level == 3
            else self.line.comm.empty(self._count, self._dtype)
        )
        with torch.no_grad():
            for slot in self.slots:
                slot.view(self._full).copy_(slot.parameter)
        self._point()
        if self.level == 3:
            self._mine = self._part().clone()
            self.release()

    def _flat_copy(self) -> Tensor:
        flat = torch.zeros(self._count, dtype=self._dtype)
        for slot in self.slots:
            slot.view(flat).copy_(slot.parameter.detach())
        return flat

    def _point(self) -> None:
        """Lets the parameters be views of the full array."""
        assert self._full is not None
        for slot in self.slots:
            slot.parameter.data = slot.view(self._full)

    def _part(self) -> Tensor:
        """This rank's share of the parameters."""
        if self._mine is not None:
            return self._mine
        assert self._full is not None
        start = self.line.rank * self._share
        return self._full[start : start + self._share]

    def optimized(self, slot: Slot) -> tuple[int, Tensor] | None:
        """What this rank's optimizer steps of a parameter: where it begins, and its values."""
        if not self.level:
            if self._master is None:
                return 0, slot.parameter.data.view(-1)
            return 0, slot.view(self._master).view(-1)
        start, stop = self._overlap(slot)
        if start >= stop:
            return None
        shares = self._part() if self._master is None else self._master
        return start, self._within(slot, shares, start, stop)

    def gradient(self, slot: Slot) -> Tensor:
        """The reduced gradient of what `optimized` returns."""
        if self.level < 2:
            assert self._gradients is not None
            if not self.level:
                return slot.view(self._gradients).view(-1)
            start, stop = self._overlap(slot)
            return self._gradients[slot.offset + start : slot.offset + stop]
        assert self._sums is not None
        return self._within(slot, self._sums, *self._overlap(slot))

    def _overlap(self, slot: Slot) -> tuple[int, int]:
        """Of a parameter's elements, those in this rank's share."""
        first = self.line.rank * self._share - slot.offset
        return max(0, first), min(slot.count, first + self._share)

    def _within(self, slot: Slot, share: Tensor, start: int, stop: int) -> Tensor:
        at = slot.offset - self.line.rank * self._share
        return share[at + start : at + stop]

    def publish(self) -> Started | None:
        """After a step of the optimizer: starts to bring parameters up to date on all ranks."""
        if self._master is not None:
            if not self.level:
                for slot in self.slots:
                    slot.parameter.data.copy_(slot.view(self._master))
                return None
            self._part().copy_(self._master)
        if self.level not in (1, 2):
            return None
        assert self._full is not None
        return self.line.start("all_gather", self._full, self._part(), out=self._full)

    def gather(self) -> None:
        """Puts the parameters together, until as many calls of `release` have come."""
        self._users += 1
        if self.level < 3 or self._users > 1:
            return  # it is all here
        assert self._full is not None and self._mine is not None
        self._full.untyped_storage().resize_(self._full.nbytes)
        self._point()
        self.line.start("all_gather", self._full, self._mine, out=self._full).wait()

    def release(self) -> None:
        """Gives up the memory of the parameters that are not this rank's share."""
        self._users = max(0, self._users - 1)
        if self.level == 3 and not self._users:
            assert self._full is not None
            # Views that autograd has saved come back to life with the storage. Who looks at a
            # parameter meanwhile finds no numbers.
            self._full.untyped_storage().resize_(0)
            nothing = torch.full((1,), torch.nan, dtype=self._dtype)
            for slot in self.slots:
                slot.parameter.data = nothing.expand(slot.shape)

    def drop(self) -> None:
        """Gives it up whoever uses it: at the end of a step."""
        self._users = 0
        self.release()

    # Gradients.

    def add(self, slot: Slot) -> None:
        """Takes a parameter's gradient over."""
        grad = slot.parameter.grad
        assert grad is not None
        view = slot.view(self._own_gradients())
        if slot.filled:
            view.add_(grad)
        else:
            view.copy_(grad)
        slot.filled = True
        slot.parameter.grad = None

    def _own_gradients(self) -> Tensor:
        """The flat array of this rank's gradients, made when it is first asked for."""
        if self._gradients is None:
            # What lasts is in memory that the others reach without a copy.
            self._gradients = (
                torch.empty(self._count, dtype=self._main)
                if self.level >= 2
                else self.line.comm.empty(self._count, self._main)
            )
            self._gradients[self.slots[-1].offset + self.slots[-1].count :] = 0
        return self._gradients

    def launch(self) -> None:
        """Starts to add up the gradients of all ranks."""
        whole = self._own_gradients()
        for slot in self.slots:
            if not slot.filled:
                slot.view(whole).zero_()
        if not self.level:
            if self.line.size > 1:
                self._reducing = self.line.start("all_reduce", whole, whole)
            return
        start = self.line.rank * self._share
        mine = whole[start : start + self._share]
        self._reducing = self.line.start("reduce_scatter", whole, whole, out=mine)

    def finish(self) -> None:
        """Waits until they are added up."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        if self.level >= 2 and self._gradients is not None:
            start = self.line.rank * self._share
            mine = self._gradients[start : start + self._share]
            if self._sums is None:
                self._sums = mine.clone()
            else:
                self._sums += mine
            self._gradients = None
            self._forget()
        self.pending = len(self.slots)
        for slot in self.slots:
            slot.ready = False

    def scale(self, factor: float) -> None:
        """Multiplies the reduced gradients."""
        reduced = self._gradients if self.level < 2 else self._sums
        assert reduced is not None
        reduced *= factor

    def clear(self) -> None:
        """Forgets the reduced gradients."""
        self._sums = None
        self._forget()

    def _forget(self) -> None:
        for slot in self.slots:
            slot.filled = False


def share_length(count: int, num_shares: int) -> int:
    """Elements of a rank's share of a bucket; the last shares are filled up."""
    return -(-count // num_shares)


def in_buckets(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters in the order in which backward reaches them, in groups of one dtype.

    Args:
        named: In the order of the model.
        bucket_bytes: What a group may hold; a larger parameter is alone.

    Returns:
        The groups, the last parameters first.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    held = 0
    for name, parameter in reversed(named):
        nbytes = parameter.numel() * parameter.element_size()
        if not groups or held + nbytes > bucket_bytes or groups[-1][0][1].dtype != parameter.dtype:
            groups.append([])
            held = 0
        groups[-1].append((name, parameter))
        held += nbytes
    return groups


__all__ = ["Bucket", "Slot", "in_buckets", "share_length"]
