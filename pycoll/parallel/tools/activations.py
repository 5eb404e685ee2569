"""The outputs of layers in a step, on one process and on a mesh: finds the first that differs.

The run gathers nothing: each rank writes its parts with their places, and the comparison finds
each part's place in the outputs of one process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.placement import Placement, Ranges
from pycoll.parallel.features.context.sequence import first_tensor
from pycoll.parallel.features.experts import Experts

if TYPE_CHECKING:
    from pycoll.parallel.trainer.trainer import Trainer


class Call(NamedTuple):
    """A call of a layer: its full name, the number of earlier calls in this forward pass, and the
    microbatch's first sample in the batch of all replicas."""

    name: str
    number: int
    first_sample: int


class Returned(NamedTuple):
    """The output of a call on one rank: its samples, values, their places if known, and the ranges
    of its share of the sequence, with the dimension."""

    num_samples: int
    value: Tensor
    ranges: Ranges
    share: tuple[int, Ranges] | None = None


class Activations:
    """Records the outputs of a rank's layers in the forward passes of a step."""

    def __init__(self, trainer: Trainer) -> None:
        """Hooks the layers of a model that `parallelize` returned."""
        self._trainer = trainer
        self._calls: Counter[str] | None = None  # while the model's forward runs
        self._found: dict[Call, Returned] = {}
        trainer.model.register_forward_pre_hook(self._begin)
        # A stage's run ends with an exception: see pipeline/parts.py.
        trainer.model.register_forward_hook(self._end, always_call=True)
        modules = dict(trainer.model.named_modules())
        lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Experts))
        for name, module in modules.items():
            # Every mesh passes tokens to experts in another order.
            if name and not name.startswith(lists):
                module.register_forward_hook(partial(self._note, name))

    def write(self, path: Path) -> None:
        """Writes the outputs of the step, and clears them."""
        mesh = self._trainer.mesh
        rank = {"place": f"rank {mesh.world.rank}: {mesh.place}", "tp": mesh.rank("tp")}
        found = [(tuple(call), tuple(returned)) for call, returned in self._found.items()]
        torch.save({**rank, "found": found}, path)
        self._found.clear()

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._calls = Counter() if model.training and torch.is_grad_enabled() else None

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._calls = None

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        value = first_tensor(output)
        # Outside of the model's forward, layers recompute for their backward.
        if value is None or self._calls is None or self._trainer.executor.stands_in:
            return
        now = self._trainer.positions.now
        weight = self._trainer.placements.get(f"{name}.weight", Placement(()))
        call = Call(name, self._calls[name], now.first_sample)
        self._calls[name] += 1
        try:
            share = self._trainer.sequence.found_in(tuple(value.shape))
        except UsageError:  # the sequence dimension is ambiguous
            return
        kept = value.detach().clone()
        self._found[call] = Returned(now.num_samples, kept, weight.ranges, share)


def first_difference(
    one: Path, others: list[Path], tolerance: float
) -> tuple[str, str, float] | None:
    """The first layer whose output differs, in the order in which one process ran the layers.

    Args:
        one: File that `Activations.write` wrote on one process.
        others: The files of all ranks of a mesh, in rank order.
        tolerance: Largest allowed difference, relative to the largest element if that exceeds 1.

    Returns:
        The layer, the rank, and the difference; None if all outputs match. Outputs whose place in
        the one-process output is unknown are skipped.
    """
    whole = _by_layer(torch.load(one, map_location="cpu")["found"])
    parts: dict[Call, list[tuple[str, int, Returned]]] = defaultdict(list)
    for path in others:
        rank = torch.load(path, map_location="cpu")
        for call, returned in rank["found"]:
            parts[Call(*call)].append((rank["place"], rank["tp"], Returned(*returned)))
    calls: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for call in parts:
        calls[call.name, call.number].append(call)
    for layer, expected in whole.items():
        for call in sorted(calls.get(layer, ())):
            for place, difference, scale in _differences(expected, call, parts[call]):
                if not difference <= tolerance * max(1.0, scale):
                    return call.name, place, difference
    return None


def _by_layer(found: list[Any]) -> dict[tuple[str, int], Returned]:
    """Gathers the microbatches of each layer's calls."""
    layers: dict[tuple[str, int], list[tuple[int, Returned]]] = {}
    for call, returned in found:
        layers.setdefault(call[:2], []).append((call[2], Returned(*returned)))
    made = {}
    for layer, pieces in layers.items():
        pieces.sort(key=lambda piece: piece[0])
        first = pieces[0][1]
        if all(p.value.shape[1:] == first.value.shape[1:] and p.value.dim() for _, p in pieces):
            value = torch.cat([piece.value for _, piece in pieces])
            made[layer] = Returned(sum(piece.num_samples for _, piece in pieces), value, ())
    return made


def _differences(
    expected: Returned, call: Call, parts: list[tuple[str, int, Returned]]
) -> Iterator[tuple[str, float, float]]:
    """Rank, largest difference and largest element of each rank's part of a call."""
    rows, rest = divmod(len(expected.value), max(expected.num_samples, 1))
    for place, tp, part in parts:
        count = part.num_samples
        samples = expected.value
        # Outputs without samples, such as embedded positions, are equal on all ranks.
        if not rest and part.value.dim() and len(part.value) == rows * count:
            samples = samples[rows * call.first_sample : rows * (call.first_sample + count)]
        if part.share is not None and part.share[0] < samples.dim():
            samples = Placement(tuple(samples.shape), *part.share).take(samples)
        found = _take(samples, tp, part, {at: p.value for _, at, p in parts})
        if found is not None and found.numel():
            difference = float((found - part.value).abs().max())
            yield place, difference, float(found.abs().max())


def _take(whole: Tensor, tp: int, part: Returned, by_tp: dict[int, Tensor]) -> Tensor | None:
    """The expected value of a rank's part: all, or its range along the shorter dimension."""
    shape = part.value.shape
    if whole.dim() != len(shape):
        return None
    dims = [dim for dim in range(len(shape)) if shape[dim] != whole.shape[dim]]
    if not dims:
        return whole
    dim = dims[0]
    sizes = [by_tp[rank].shape[dim] for rank in sorted(by_tp)]
    if len(dims) > 1 or sum(sizes) != whole.shape[dim]:
        return None
    start = sum(by_tp[rank].shape[dim] for rank in by_tp if rank < tp)
    ranges: tuple[tuple[int, int], ...] = ((start, start + shape[dim]),)
    own = sum(stop - start for start, stop in part.ranges)
    if own == shape[dim] and max(stop for _, stop in part.ranges) <= whole.shape[dim]:
        ranges = part.ranges  # as in the weight: queries, keys and values in one layer
    return Placement(tuple(whole.shape), dim, ranges).take(whole)


__all__ = ["Activations", "first_difference"]
