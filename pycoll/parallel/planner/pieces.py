"""A rank's part of a model, measured in pieces: before the blocks, each block, behind them.

`parallelize`'s own features share the layers out, on tensors without values. Blocks with equal
shapes cost the same, so one of each kind is traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pycoll.parallel.build import apply_all
from pycoll.parallel.core.batches import as_call
from pycoll.parallel.core.losses import of_whole
from pycoll.parallel.core.mesh_sizes import AXES
from pycoll.parallel.core.meta_model import MetaMesh, Saved, on_meta
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.data.reducer import main_dtype
from pycoll.parallel.features.feature import Build, Options
from pycoll.parallel.features.recompute import Recompute
from pycoll.parallel.planner.blocks import Shortened
from pycoll.parallel.planner.trace import Operator, Sent, TracedLedger, like, record
from pycoll.topology import Device

Calls = Counter[tuple[str, str, int]]  # number of calls, by axes, collective and payload in bytes
FIRST, LAST = "first", "last"


@dataclass(slots=True)
class Piece:
    """What a part of the model costs a rank for one microbatch.

    Attributes:
        forward_s: Seconds of the forward pass on the device.
        backward_s: Seconds of the backward pass, with what is computed again.
        flops: Operations of both passes, with what is computed again.
        forward_calls: Collectives of the forward pass.
        backward_calls: Collectives of the backward pass.
        kept: Bytes that are kept for the backward pass.
        frozen: Bytes of weights that do not learn.
        weights: Elements and their bytes, by the axes besides dp along which gradients are summed.
        operators: Number of equal operators of both passes: name, operations, bytes.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    forward_calls: Calls = field(default_factory=Counter)
    backward_calls: Calls = field(default_factory=Counter)
    kept: int = 0
    frozen: int = 0
    weights: dict[tuple[tuple[str, ...], int, int], int] = field(default_factory=dict)
    operators: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def add(self, events: Sequence[Operator | Sent], device: Device) -> None:
        """Adds operators and collectives; an object that is listed repeatedly costs little."""
        counts = Counter(map(id, events))
        forward_s, backward_s = dict[int, float](), dict[int, float]()
        for key, event in {id(event): event for event in events}.items():
            is_forward = event.part == "forward"
            if isinstance(event, Sent):
                calls = self.forward_calls if is_forward else self.backward_calls
                calls[event.axis, event.collective, event.nbytes] += counts[key]
                continue
            self.operators[event.name, event.flops, event.nbytes] += counts[key]
            self.flops += counts[key] * event.flops
            spent = forward_s if is_forward else backward_s
            spent[key] = device.seconds(event.flops, event.nbytes)
        # In the order of the events: sums do not depend on which of them are one object.
        for key in map(id, events):
            if key in forward_s:
                self.forward_s += forward_s[key]
            elif key in backward_s:
                self.backward_s += backward_s[key]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model in pieces.

    Attributes:
        first: What comes before the blocks.
        blocks: The blocks, in order.
        last: What comes behind the blocks, with the loss.
        hidden: Bytes that a rank passes from a block to the next.
    """

    first: Piece
    blocks: list[Piece]
    last: Piece
    hidden: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank's part does for one microbatch, by piece: FIRST, LAST, or the number of a block.

    Attributes:
        events: Operators and collectives.
        kept: Bytes that are kept for the backward pass.
        lasting: Weights, as pieces that have nothing else.
        hidden: Bytes that a rank passes from a block to the next.
    """

    events: dict[int | str, list[Operator | Sent]]
    kept: dict[int | str, int]
    lasting: dict[int | str, Piece]
    hidden: int

    def pieces(self, kinds: list[int], device: Device) -> Pieces:
        """The time of each piece on a device; `kinds` as in `Shortened`."""
        found = {}
        for key, events in self.events.items():
            lasting = self.lasting[key]
            found[key] = Piece(kept=self.kept[key], frozen=lasting.frozen, weights=lasting.weights)
            found[key].add(events, device)
        return Pieces(found[FIRST], [found[kind] for kind in kinds], found[LAST], self.hidden)


def measure(
    short: Shortened,
    x: Any,
    options: Options,
    sizes: Mapping[str, int],
    *,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
) -> Share:
    """Measures rank 0's part; call within `without_values`.

    Args:
        short: The plain model with one block of each kind.
        x: A microbatch of one replica; only shapes and dtypes matter.
        options: As for `parallelize`; pp names the blocks, None: the whole model comes first.
        sizes: Sizes of the axes that share out layers: tp, cp, ep.
        y: Targets of `x`, for `loss`.
        loss: As in `step`; None: the loss costs nothing.

    Returns:
        What the part does.

    Raises:
        UsageError: The model cannot be shared out like this, or cannot run without values.

    Cost: one pass through the model's Python code in each direction, for one block of each kind.
    """
    sizes = dict.fromkeys(AXES, 1) | dict(sizes)
    ledger = TracedLedger()
    build = Build(on_meta(short.model), MetaMesh(sizes, {}, ledger), options, Positions())
    apply_all(build, meta=True)
    batch, target = like(x), like(y)
    args, kwargs = as_call(batch)
    known = [*build.model.parameters(), *build.model.buffers()]
    with Saved([*known, *tensors_in([args, kwargs, target])]) as saved:
        build[Recompute].kept.note = saved.note
        notes = _Kept(build, options.pp, saved)
        of_share = (
            None if loss is None else build[ContextParallel].sequence.of_shares(of_whole(loss))
        )
        trace = record(build.model, batch, y=target, loss=of_share, ledger=ledger)
        notes.end(saved)
    return _sorted(build, options.pp, trace.events, notes)


class _Kept:
    """Notes what each piece keeps for the backward pass, and what a block returns."""

    def __init__(self, build: Build, blocks: str | None, saved: Saved) -> None:
        self.nbytes: dict[int | str, int] = Counter()
        self.hidden = 0
        self._before, self._at = 0, FIRST
        children = build.model.get_submodule(blocks).children() if blocks else ()
        for i, block in enumerate(children):
            block.register_forward_pre_hook(lambda *_, i=i: self._move(saved, i))
            block.register_forward_hook(lambda *of, i=i: self._left(saved, of[-1]))

    def _move(self, saved: Saved, to: int | str) -> None:
        self.nbytes[self._at] += saved.nbytes - self._before
        self._before, self._at = saved.nbytes, to  # type: ignore[assignment]

    def _left(self, saved: Saved, output: Any) -> None:
        self._move(saved, LAST)
        self.hidden = sum(t.numel() * t.element_size() for t in tensors_in(output))

    def end(self, saved: Saved) -> None:
        """Adds what was kept behind the last block."""
        self._move(saved, LAST)


def _sorted(build: Build, blocks: str | None, events: list[Operator | Sent], notes: _Kept) -> Share:
    """What belongs to each piece."""
    count = len(list(build.model.get_submodule(blocks).children())) if blocks else 0
    keys = (FIRST, LAST, *range(count))
    share = Share(
        {k: [] for k in keys}, dict.fromkeys(keys, 0), {k: Piece() for k in keys}, notes.hidden
    )
    names = {f"{blocks}.{i}": i for i in range(count)}
    seen = {True: False, False: False}  # whether a block has run, in forward and in backward
    numbers: dict[int, int | None] = {}  # by event: equal steps of a ring are one object
    for event in events:
        if id(event) not in numbers:
            numbers[id(event)] = next((names[of] for of in event.layers if of in names), None)
        number = numbers[id(event)]
        is_forward = event.part == "forward"
        if number is not None:
            seen[is_forward] = True
        # Before its blocks the forward pass is at the first piece, the backward pass at the last.
        outside = LAST if count and seen[is_forward] == is_forward else FIRST
        share.events[outside if number is None else number].append(event)
    for key, nbytes in notes.nbytes.items():
        share.kept[key if count else FIRST] += nbytes
    whole_mesh = MetaMesh(dict.fromkeys(AXES, 2), {})
    for name, parameter in build.model.named_parameters():
        number = next((i for of, i in names.items() if name.startswith(f"{of}.")), None)
        own = share.lasting[_outside(build, name, blocks) if number is None else number]
        if parameter.requires_grad:
            axes = tuple(build.group_of(whole_mesh, parameter).axis.split("+"))
            main = main_dtype(parameter.dtype).itemsize
            of = axes, parameter.dtype.itemsize, main
            own.weights[of] = own.weights.get(of, 0) + parameter.numel()
        else:
            own.frozen += parameter.numel() * parameter.element_size()
    return share


def _outside(build: Build, name: str, blocks: str | None) -> str:
    """The end of the model that holds a parameter outside the blocks, by the order of layers."""
    if not blocks:
        return FIRST
    names = [layer for layer, _ in build.model.named_modules()]
    return FIRST if names.index(name.rpartition(".")[0]) < names.index(blocks) else LAST


def check_traceable(model: nn.Module, x: Any) -> None:
    """Checks that a model runs without values.

    Raises:
        UsageError: It does not; the message names the last operator.
    """
    record(on_meta(model), like(x))


__all__ = ["Calls", "Piece", "Pieces", "Share", "check_traceable", "measure"]
