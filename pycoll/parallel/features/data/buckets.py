"""Buckets: one collective reduces the gradients of several parameters while backward runs.

The ZeRO level decides what is sharded: 0 nothing, 1 the optimizer's state, 2 also gradients,
3 also parameters. A bucket is one flat array; rank r's share is its r-th equal part, so a
parameter may lie partly in one share and partly in the next.
Source: Rajbhandari et al., ZeRO, arXiv:1910.02054; Li et al., PyTorch Distributed,
arXiv:2006.15704.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pycoll.parallel.core.dealing import Dealing
from pycoll.parallel.core.deferred import write_values
from pycoll.parallel.core.ledger import AxisGroup, Started
from pycoll.parallel.features.data.fixed_sum import FixedSum
from pycoll.parallel.features.data.slots import Slot

# The ranks that shard what a group of ranks holds, and those with the same share, if any.
Split = Callable[[AxisGroup], tuple[AxisGroup, AxisGroup | None]]

_LONGEST_VECTOR = 64  # elements that a kernel of torch steps at once, at most


class Bucket:
    """Some of a rank's parameters, their gradients, and the shares of both.

    Attributes:
        slots: The parameters.
        group: The ranks whose gradients are added up.
        shares: Those of them that shard what the ZeRO level says; the others have copies.
        level: ZeRO level.
        pending: Number of gradients that this backward pass has yet to compute.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        group: AxisGroup,
        level: int,
        main: torch.dtype,
        reduce: torch.dtype | None = None,
        split: Split | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        self.group, self.level = group, level
        self.shares, self._copies = split(group) if split and level else (group, None)
        self.slots: list[Slot] = []
        # An optimizer steps whole vectors and then the rest of a piece, with other roundings. So
        # pieces of virtual replicas end where vectors end, or where the parameter ends.
        unit, offset = 1 if dealing is None else _LONGEST_VECTOR, 0
        for name, parameter in named:
            self.slots.append(Slot(name, parameter, offset, parameter.shape))
            offset += -(-parameter.numel() // unit) * unit
        self.pending = len(self.slots)
        num_shares = self.shares.size if level or dealing is not None else 1
        self._share = share_length(offset, num_shares, unit)
        self._count = self._share * num_shares
        # With virtual replicas: their gradients, which are added up in one order.
        self._fixed = None if dealing is None else FixedSum(group, dealing, self._share)
        self._dtype, self._reduce = named[0][1].dtype, reduce or main
        # Gradients of all parameters; those of a whole pass stay from the start, since on a device
        # all ranks make such memory together.
        self._gradients = self.shares.array(self._count, self._reduce) if level < 2 else None
        self._reducing: Started | None = None
        self._reduced: Tensor | None = None  # gradients of the share, which are being added up
        self._sums: Tensor | None = None  # reduced gradients of the share
        self._full: Tensor | None = None  # all parameters, where shares are gathered
        self._mine: Tensor | None = None  # share of the parameters, if sharded
        self._master: Tensor | None = None  # the share in the main dtype, if it differs
        self._gathers = 0  # calls of `gather` without their `release`
        if level:
            self._flatten()
        if main != self._dtype:
            self._master = (self._part() if level else self._flat_copy()).to(main)

    # Parameters.

    def _flatten(self) -> None:
        """Makes parameters views of one array, of which ZeRO 3 keeps this rank's share."""
        # Arrays that stay are allocated where the other ranks access them without a copy.
        self._full = (
            torch.zeros(self._count, dtype=self._dtype, device=self.group.device)
            if self.level == 3
            else self.shares.array(self._count, self._dtype)
        )
        with torch.no_grad():
            for slot in self.slots:
                write_values(slot.parameter, slot.view(self._full))
        self._point()
        if self.level == 3:
            self._mine = self._part().clone()
            self.release()

    def _flat_copy(self) -> Tensor:
        flat = torch.zeros(self._count, dtype=self._dtype, device=self.group.device)
        for slot in self.slots:
            slot.view(flat).copy_(slot.parameter.detach())
        return flat

    def _point(self) -> None:
        """Makes the parameters views of the full array."""
        assert self._full is not None
        for slot in self.slots:
            slot.parameter.data = slot.view(self._full)

    def _part(self) -> Tensor:
        """This rank's share of the parameters."""
        if self._mine is not None:
            return self._mine
        assert self._full is not None
        return self._mine_of(self._full)

    def optimized(self, slot: Slot) -> tuple[int, Tensor] | None:
        """The part of a parameter that this rank's optimizer steps: its start, and its values."""
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
        """The reduced gradient of the part that `optimized` returns."""
        if not self.level:
            assert self._gradients is not None
            return slot.view(self._gradients).view(-1)
        assert self._sums is not None
        return self._within(slot, self._sums, *self._overlap(slot))

    def _overlap(self, slot: Slot) -> tuple[int, int]:
        """First and last + 1 element of a parameter within this rank's share."""
        first = self.shares.rank * self._share - slot.offset
        return max(0, first), min(slot.count, first + self._share)

    def _within(self, slot: Slot, share: Tensor, start: int, stop: int) -> Tensor:
        at = slot.offset - self.shares.rank * self._share
        return share[at + start : at + stop]

    def publish(self) -> Started | None:
        """Starts to update the parameters on all ranks after a step of the optimizer."""
        if self._master is not None:
            if not self.level:
                for slot in self.slots:
                    slot.parameter.data.copy_(slot.view(self._master))
                return None
            self._part().copy_(self._master)
        if self.level not in (1, 2):
            return None
        assert self._full is not None
        mine = self.shares.own_part(self._part())
        return self.shares.start("all_gather", self._full, mine, out=self._full)

    def gather(self) -> None:
        """Gathers the parameters; they stay until `release` is called equally often."""
        self._gathers += 1
        if self.level < 3 or self._gathers > 1:
            return  # already gathered
        assert self._full is not None and self._mine is not None
        self._full.untyped_storage().resize_(self._full.nbytes)
        self._point()
        self.shares.start("all_gather", self._full, self._mine, out=self._full).wait()

    def release(self) -> None:
        """Frees the parameters outside this rank's share, after the last matching `release`."""
        self._gathers = max(0, self._gathers - 1)
        if self.level == 3 and not self._gathers:
            assert self._full is not None
            # Views saved by autograd become valid again with the storage. Until then, parameters
            # have no values.
            self._full.untyped_storage().resize_(0)
            nothing = torch.full((1,), torch.nan, dtype=self._dtype, device=self.group.device)
            for slot in self.slots:
                slot.parameter.data = nothing.expand(slot.shape)

    def drop(self) -> None:
        """Frees the gathered parameters at the end of a step, whatever their number of uses."""
        self._gathers = 0
        self.release()

    # Gradients.

    def add(self, slot: Slot) -> None:
        """Takes a parameter's gradient into the bucket."""
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
        """The flat array of this rank's gradients; where they are sharded, made at first use."""
        if self._gradients is None:
            device = self.group.device
            self._gradients = torch.empty(self._count, dtype=self._reduce, device=device)
            self._gradients[self.slots[-1].offset + self.slots[-1].count :] = 0
        return self._gradients

    def _filled_gradients(self) -> Tensor:
        """This rank's gradients; zeros where none came."""
        whole = self._own_gradients()
        for slot in self.slots:
            if not slot.filled:
                slot.view(whole).zero_()
        return whole

    def fold(self, part: int | None) -> None:
        """Sets the gradients of a virtual replica aside; None: there was none."""
        assert self._fixed is not None
        if part is not None:
            self._fixed.add(part, self._filled_gradients().clone())
        self._forget()

    def launch(self, part: int | None = None) -> None:
        """Starts adding up the gradients of all ranks; `part` as in `fold`, for the last ones."""
        whole = self._filled_gradients()
        if self._fixed is not None:
            if part is not None:
                self._fixed.add(part, whole)
            self._fixed.start(whole)
            return
        if not self.level:
            if self.group.size > 1:
                self._reducing = self.group.start("all_reduce", whole, whole)
            return
        mine = self._mine_of(whole)
        self._reduced = self.shares.own_part(mine) if self.level == 1 else mine
        self._reducing = self.shares.start("reduce_scatter", whole, whole, out=self._reduced)

    def finish(self) -> None:
        """Waits until the gradients are added up."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
            self._add_copies()
        if self._fixed is not None and (total := self._fixed.finish()) is not None:
            self._reduced = total
            if not self.level:
                whole, self._reduced = self._own_gradients(), None
                self.group.start("all_gather", whole, total, out=whole).wait()
        reduced, self._reduced = self._reduced, None
        if reduced is not None and self.level == 1:
            self._sums = reduced
        elif reduced is not None:
            if self._sums is None:
                self._sums = reduced.clone()
            else:
                self._sums += reduced
            self._gradients = None
            self._forget()
        self.pending = len(self.slots)
        for slot in self.slots:
            slot.ready = False

    def _mine_of(self, whole: Tensor) -> Tensor:
        """This rank's share of an array of all parameters."""
        start = self.shares.rank * self._share
        return whole[start : start + self._share]

    def _add_copies(self) -> None:
        """Adds up the shares of the ranks that have the same one."""
        if self._copies is not None and self._reduced is not None:
            self._copies.all_reduce(self._reduced)

    def scale(self, factor: float) -> None:
        """Multiplies the reduced gradients."""
        reduced = self._sums if self.level else self._gradients
        assert reduced is not None
        reduced *= factor

    def clear(self) -> None:
        """Clears the reduced gradients."""
        self._sums = None
        if self._fixed is not None:
            self._fixed.clear()
        self._forget()

    def _forget(self) -> None:
        for slot in self.slots:
            slot.filled = False


def share_length(count: int, num_shares: int, unit: int = 1) -> int:
    """Elements of a rank's share of a bucket, whole units; the last shares are padded."""
    return -(-count // (num_shares * unit)) * unit


__all__ = ["Bucket", "Split", "share_length"]
