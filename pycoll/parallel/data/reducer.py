"""Adds up the replicas' gradients while backward goes on, and knows whose element is whose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.data.buckets import Bucket, Slot, in_buckets

_AT_ONCE = 2  # buckets that are reduced at once, where gradients are shared out
_LOW = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Piece:
    """What this rank's optimizer steps of a parameter.

    Attributes:
        name: Full name of the parameter.
        placement: Of the rank's part of the parameter in the whole one.
        start: Of the piece in the flat part.
        value: The values, flat; or the parameter itself, where it is whole.
        owned: Whether this rank answers for it: of all ranks, one does for each element.
        slot: The parameter.
        bucket: Where it is.
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
        """Of the rank's part."""
        return self.slot.shape


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of parameters of `dtype` are added up, and the optimizer steps."""
    return torch.float32 if dtype in _LOW else dtype


def in_lines(
    named: list[tuple[str, nn.Parameter]],
    lines: Callable[[nn.Parameter], AxisGroup],
    level: int,
    groups: list[set[str]],
    bucket_bytes: int,
) -> Iterator[tuple[AxisGroup, list[tuple[str, nn.Parameter]]]]:
    """The parameters of each bucket, and the ranks that share it; arguments as of `Reducer`."""
    by_line: dict[str, list[tuple[str, nn.Parameter]]] = {}
    of_axis: dict[str, AxisGroup] = {}
    for name, parameter in named:
        line = lines(parameter)
        of_axis[line.axis] = line
        by_line.setdefault(line.axis, []).append((name, parameter))
    for axis, members in by_line.items():
        for names in groups:
            inside = [(name, parameter) for name, parameter in members if name in names]
            for bucket in in_buckets(inside, 1 << 62 if level == 3 else bucket_bytes):
                yield of_axis[axis], bucket


class Reducer:
    """The buckets of a rank's parameters.

    Attributes:
        buckets: In the order in which they are reduced, alike on all ranks of a line.
        pieces: By the parameter's full name; a parameter without one is another rank's.
        names: Of all parameters that learn, in the order of the model.
        unused: Names of parameters that no replica used in the last step.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        *,
        lines: Callable[[nn.Parameter], AxisGroup],
        owned: Callable[[str, nn.Parameter, AxisGroup], bool],
        placements: dict[int, Placement],
        level: int,
        groups: list[set[str]],
        bucket_bytes: int,
        late: Collection[str] = (),
        everyone: list[str] | None = None,
    ) -> None:
        """As `parallelize` says.

        Args:
            named: The parameters that learn, in the order of the model.
            lines: The ranks over which a parameter's gradient is added up.
            owned: Whether this rank, of those that hold the same, answers for a parameter: of its
                name, itself, and its line.
            placements: Of parts, by id.
            level: Of ZeRO.
            groups: Names of parameters, each in one of them: no bucket has some of two. ZeRO 3
                puts a group together at once; else a group may be several buckets.
            bucket_bytes: Of a bucket, at most.
            everyone: Names of what this rank and those have with which it agrees on what was used,
                alike on all of them; None: `named`.
            late: Names whose gradients are made elsewhere, too: `complete` takes them over, hooks
                do not.
        """
        self.level = level
        self.unused: list[str] = []
        self.names = [name for name, _ in named]
        self._everyone = self.names if everyone is None else everyone
        self._used: set[str] = set()
        self._launched = 0
        self._reduce_now = self._staged = False
        self._late = late
        self._expected: set[str] = set()  # whose next gradient is the last before it is reduced
        self.buckets: list[Bucket] = []
        for line, members in in_lines(named, lines, level, groups, bucket_bytes):
            self.buckets.append(Bucket(members, line, level, main_dtype(members[0][1].dtype)))
        order = {name: i for i, name in enumerate(self.names)}
        self.buckets.sort(
            key=lambda bucket: (
                bucket.slots[0].name in late,
                -max(order[slot.name] for slot in bucket.slots),
            )
        )
        self.pieces: dict[str, Piece] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                place = placements.get(id(slot.parameter), Placement(tuple(slot.shape)))
                mine = owned(slot.name, slot.parameter, bucket.line)
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
        """Before gradients are made.

        Args:
            reduce: Whether they are to be reduced.
            staged: Several backward passes come: `expect` says which are the last. Else one does.
        """
        self._reduce_now, self._staged = reduce, staged
        self._launched = 0
        self._expected = set() if staged or not reduce else set(self.names)

    def expect(self, names: Iterable[str]) -> None:
        """The next gradients of these parameters are their last ones before they are reduced."""
        if self._reduce_now:
            self._expected.update(names)

    def complete(self, names: Collection[str]) -> None:
        """No more gradients of these parameters come: reduces the buckets that are complete."""
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
        bucket.launch()
        bucket.release()
        self._launched += 1
        if self.level >= 2 and self._launched > _AT_ONCE and not self._staged:
            # What is reduced gives up its memory before the next ones need theirs. A stage does not
            # wait here: other stages wait for it.
            self.buckets[self._launched - 1 - _AT_ONCE].finish()

    def finish(self) -> None:
        """Reduces what backward did not reach, and waits for all."""
        while self._launched < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            bucket.finish()
        self._launched = 0

    def presence(self) -> Tensor:
        """Which parameters this rank used since `settle`: one float64 each."""
        return torch.tensor([float(n in self._used) for n in self._everyone], dtype=torch.float64)

    def settle(self, presence: Tensor, scale: float) -> None:
        """Gives the pieces their gradients: the sums times `scale`; none where nobody used them."""
        used = dict(zip(self._everyone, presence.tolist(), strict=True))
        self.unused = [name for name in self.names if not used[name]]
        if scale != 1.0:
            for bucket in self.buckets:
                bucket.scale(scale)
        absent = set(self.unused)
        for piece in self.pieces.values():
            gradient = piece.bucket.gradient(piece.slot).view_as(piece.value)
            piece.value.grad = None if piece.name in absent else gradient

    def clear(self) -> None:
        """Forgets all gradients."""
        for bucket in self.buckets:
            bucket.clear()
        for piece in self.pieces.values():
            piece.value.grad = None
        self._used.clear()

    def publish(self) -> None:
        """Brings parameters up to date on all ranks after the pieces have changed."""
        for started in [bucket.publish() for bucket in self.buckets]:
            if started is not None:
                started.wait()


__all__ = ["Piece", "Reducer", "in_lines", "main_dtype"]
