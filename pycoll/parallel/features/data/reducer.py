"""Adds up the replicas' gradients while backward runs, and records each element's owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pycoll.parallel.core.dealing import Dealing
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.features.data.buckets import Bucket, Split
from pycoll.parallel.features.data.grouping import in_axis_groups
from pycoll.parallel.features.data.slots import Slot

_AT_ONCE = 2  # buckets reduced at once, if gradients are sharded
_LOW = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Piece:
    """The part of a parameter that this rank's optimizer steps.

    Attributes:
        name: Full name of the parameter.
        placement: Place of the rank's part in the whole parameter.
        start: Start of the piece in the flat part.
        value: The values, flat; or the parameter itself, if the piece is all of it.
        owned: Whether this rank owns the piece; each element has one owner among all ranks.
        slot: The parameter.
        bucket: The parameter's bucket.
    """

    name: str
    placement: Placement
    start: int
    value: nn.Parameter
    owned: bool
    slot: Slot
    bucket: Bucket

    @property
    def local_shape(self) -> torch.Size:
        """Shape of the rank's part."""
        return self.slot.shape

    def cut(self, whole: Tensor) -> Tensor:
        """The values of the piece, flat, from the whole tensor."""
        local = self.placement.take(whole).reshape(-1)
        return local[self.start : self.start + self.value.numel()]


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are added up and the optimizer steps."""
    return torch.float32 if dtype in _LOW else dtype


class Reducer:
    """The buckets of a rank's parameters.

    Attributes:
        buckets: In the order in which they are reduced, identical on all ranks of a group.
        pieces: Pieces by the parameter's full name; other ranks have the missing ones.
        names: Names of all trainable parameters, in the order of the model.
        unused: Names of parameters that no replica used in the last step.
        part: The virtual replica whose gradients come next; None: there is none.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        *,
        group_of: Callable[[nn.Parameter], AxisGroup],
        owned: Callable[[str, nn.Parameter, AxisGroup], bool],
        placements: dict[int, Placement],
        level: int,
        groups: list[set[str]],
        bucket_bytes: int,
        reduce: torch.dtype | None = None,
        split: Split | None = None,
        late: Collection[str] = (),
        everyone: list[str] | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        """See `parallelize`.

        Args:
            named: The trainable parameters, in the order of the model.
            group_of: Returns the ranks over which a parameter's gradient is added up.
            owned: Whether this rank, among those that hold the same parameter, owns it; called
                with its name, the parameter and its group.
            placements: Placements of parameters that are parts, by id.
            level: ZeRO level.
            groups: Disjoint sets of parameter names; no bucket spans two of them. ZeRO 3 gathers a
                set at once; otherwise it may take several buckets.
            bucket_bytes: Largest size of a bucket.
            reduce: Dtype in which gradients of 16-bit parameters are added up; None: float32.
            split: Divides a group into ranks that shard and ranks that have copies; None: all of
                them shard.
            everyone: Names of the parameters of all ranks that agree on which ones were used,
                identical on all of them; None: `named`.
            late: Names of parameters that other ranks use too: `complete` takes their gradients
                over, hooks do not.
            dealing: The virtual replicas, whose gradients are added up in one order; None: none.
        """
        self.level = level
        self.part: int | None = None
        self.unused: list[str] = []
        self.names = [name for name, _ in named]
        self._everyone = self.names if everyone is None else everyone
        self._used: set[str] = set()
        self._launched = 0
        self._reduce_now = self._staged = False
        self._late = late
        self._expected: set[str] = set()  # parameters whose next gradient is the last one
        self.buckets: list[Bucket] = []
        for group, members in in_axis_groups(named, group_of, level, groups, bucket_bytes):
            dtype = members[0][1].dtype
            of_sums = reduce if dtype in _LOW else None
            self.buckets.append(
                Bucket(members, group, level, main_dtype(dtype), of_sums, split, dealing)
            )
        order = {name: i for i, name in enumerate(self.names)}
        # What lies outside of the blocks comes first: so no bucket is reduced between the gathers
        # and the exchanges of tokens within backward, which a replica whose experts get no tokens
        # reaches at another moment. Norms in float32 between short weights are complete last.
        self.buckets.sort(
            key=lambda bucket: (
                bucket.slots[0].name in late,
                bucket.slots[0].parameter.dtype not in _LOW,
                -max(order[slot.name] for slot in bucket.slots),
            )
        )
        self.pieces: dict[str, Piece] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                place = placements.get(id(slot.parameter), Placement(tuple(slot.shape)))
                mine = owned(slot.name, slot.parameter, bucket.group)
                self._add_piece(bucket, slot, place, mine)
                slot.parameter.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, bucket, slot)
                )
        self.pieces = {name: self.pieces[name] for name in self.names if name in self.pieces}

    def _add_piece(self, bucket: Bucket, slot: Slot, placement: Placement, owned: bool) -> None:
        found = bucket.optimized(slot)
        if found is None:
            return
        start, values = found
        whole = values.data_ptr() == slot.parameter.data_ptr() and not bucket.level
        value = slot.parameter if whole else nn.Parameter(values, requires_grad=True)
        self.pieces[slot.name] = Piece(slot.name, placement, start, value, owned, slot, bucket)

    def begin(self, *, reduce: bool, staged: bool = False) -> None:
        """Prepares a backward pass.

        Args:
            reduce: Whether its gradients are reduced.
            staged: Several backward passes follow, and `expect` names the last; else there is one.
        """
        self._reduce_now, self._staged = reduce, staged
        self._launched = 0
        self._expected = set() if staged or not reduce else set(self.names)

    def expect(self, names: Iterable[str]) -> None:
        """Declares the next gradients of these parameters the last ones before the reduction."""
        if self._reduce_now:
            self._expected.update(names)

    def complete(self, names: Collection[str]) -> None:
        """Declares the gradients of these parameters final, and reduces complete buckets."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name in names:
                    if slot.parameter.grad is not None:
                        self._take(bucket, slot)
                    if self._reduce_now:
                        self._ready(bucket, slot)

    def _on_gradient(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
        if slot.name in self._late:
            return
        self._take(bucket, slot)
        if slot.name in self._expected:
            self._ready(bucket, slot)

    def _take(self, bucket: Bucket, slot: Slot) -> None:
        self._used.add(slot.name)
        bucket.add(slot)

    def _ready(self, bucket: Bucket, slot: Slot) -> None:
        if slot.ready:
            return
        slot.ready = True
        bucket.pending -= 1
        while self._launched < len(self.buckets) and not self.buckets[self._launched].pending:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._launched]
        bucket.launch(self.part)
        bucket.release()
        self._launched += 1
        if self.level >= 2 and self._launched > _AT_ONCE and not self._staged:
            # A reduced bucket frees its memory before the next one needs memory. A pipeline stage
            # does not wait here, since other stages wait for it.
            self.buckets[self._launched - 1 - _AT_ONCE].finish()

    def finish(self) -> None:
        """Reduces the buckets that backward did not reach, and waits for all."""
        while self._launched < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            bucket.finish()
        self._launched = 0

    def fold(self) -> None:
        """Sets the gradients of virtual replica `part` aside, which were not reduced."""
        for bucket in self.buckets:
            bucket.fold(self.part)

    def presence(self) -> Tensor:
        """Marks the parameters that this rank used since `settle`: one float64 each."""
        return torch.tensor([float(n in self._used) for n in self._everyone], dtype=torch.float64)

    def settle(self, presence: Tensor, scale: float) -> None:
        """Sets the pieces' gradients to the sums times `scale`; None for unused parameters."""
        used = dict(zip(self._everyone, presence.tolist(), strict=True))
        self.unused = [name for name in self.names if not used[name]]
        if scale != 1.0:
            for bucket in self.buckets:
                bucket.scale(scale)
        absent = set(self.unused)
        for piece in self.pieces.values():
            gradient = piece.bucket.gradient(piece.slot).view_as(piece.value)
            piece.value.grad = None if piece.name in absent else gradient.to(piece.value.dtype)

    def clear(self) -> None:
        """Clears all gradients."""
        self.detach()
        for piece in self.pieces.values():
            piece.value.grad = None

    def detach(self) -> None:
        """Makes the next backward pass start from nothing; `.grad` stays until it begins."""
        for bucket in self.buckets:
            bucket.clear()
        self._used.clear()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters that ZeRO 3 shards, for a pass that uses them many times."""
        for bucket in self.buckets:
            bucket.gather()
        yield
        self.drop()

    def drop(self) -> None:
        """Frees the gathered parameters."""
        for bucket in self.buckets:
            bucket.drop()

    def publish(self) -> None:
        """Updates the parameters on all ranks after the pieces have changed."""
        for started in [bucket.publish() for bucket in self.buckets]:
            if started is not None:
                started.wait()


__all__ = ["Piece", "Reducer", "main_dtype"]
