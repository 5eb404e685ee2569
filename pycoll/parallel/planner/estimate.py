"""Time and memory of a step on one device, by layer and operator, before it runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import as_call, num_samples
from pycoll.parallel.core.meta_model import Saved, on_meta
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.recompute import Kept, recompute_layers
from pycoll.parallel.planner.flops import refuse_parts
from pycoll.parallel.planner.trace import PASSES, Operator, like, record, without_values
from pycoll.topology import Device


@dataclass(slots=True)
class Work:
    """Sums over operators.

    Attributes:
        flops: Operations, by pass: "forward", "backward", "recomputed".
        nbytes: Bytes read and written, by pass.
        seconds: Time on the device, by pass.
    """

    flops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PASSES, 0))
    nbytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PASSES, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PASSES, 0.0))

    def add(self, operator: Operator, seconds: float) -> None:
        """Adds one operator."""
        self.flops[operator.part] += operator.flops
        self.nbytes[operator.part] += operator.nbytes
        self.seconds[operator.part] += seconds

    @property
    def total_s(self) -> float:
        """Seconds of all passes."""
        return sum(self.seconds.values())

    @property
    def total_flops(self) -> int:
        """Operations of all passes."""
        return sum(self.flops.values())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step of a plain model on one device; the optimizer is not included.

    Attributes:
        device: The device.
        model: Sums over all operators.
        by_layer: Sums by full name of the layer; a layer has what is within it.
        by_operator: Sums by operator, such as "aten.mm".
        parameters: Bytes of the weights.
        activations: Bytes that the forward pass keeps for the backward pass.
        samples: Number of samples of the batch.
    """

    device: Device
    model: Work
    by_layer: dict[str, Work]
    by_operator: dict[str, Work]
    parameters: int
    activations: int
    samples: int

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.model.total_s

    @property
    def mfu(self) -> float:
        """Operations of both passes, without recomputation, over what the device could do."""
        useful = self.model.total_flops - self.model.flops["recomputed"]
        return useful / (self.seconds * self.device.flops_per_s) if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """The kind of layer that takes most time, what bounds it, and how to split it."""
        return _bottleneck(self)

    def table(self, depth: int = 2) -> str:
        """Text with a line for each layer whose name has at most `depth` parts."""
        rows = [("model", self.model)]
        rows += [(name, of) for name, of in self.by_layer.items() if name.count(".") < depth]
        head = ("layer", "forward", "backward", "recomputed", "GFLOP", "MB moved", "of time")
        lines: list[tuple[str, ...]] = [head]
        for name, work in rows:
            lines.append(
                (
                    name,
                    *(f"{work.seconds[part] * 1e3:.3f} ms" for part in PASSES),
                    f"{work.total_flops / 1e9:,.3f}",
                    f"{sum(work.nbytes.values()) / 1e6:,.1f}",
                    f"{work.total_s / self.seconds if self.seconds else 0:.0%}",
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "\n".join(
            [
                *text,
                f"weights {self.parameters / 1e6:,.1f} MB, activations for backward "
                f"{self.activations / 1e6:,.1f} MB, MFU {self.mfu:.0%} on {self.device.name}",
                self.bottleneck,
            ]
        )


def estimate(
    model: nn.Module,
    x: Any,
    device: Device,
    *,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    recompute: str | bool | None = None,
    pp: str | None = None,
) -> Estimate:
    """Estimates a forward and a backward pass of a plain model, without ranks and without values.

    Args:
        model: The model before `parallelize`; it may be on the device "meta". Its forward must not
            depend on values.
        x: A batch as for `model.step`; only shapes and dtypes matter.
        device: Rates of the device: `topology.load(file).device`, or `pc.calibrate()`.
        y: Targets of `x`, for `loss`.
        loss: As in `step`; None: the loss costs nothing.
        recompute: As in `parallelize`.
        pp: Name of the list of blocks, for `recompute="full"`.

    Returns:
        The estimate. An operator takes the time of its arithmetic or of its memory traffic,
        whichever is longer (`Device.seconds`).

    Raises:
        UsageError: The model has been parallelized, or cannot run without values.

    Cost: one pass through the model's Python code for each direction.
    Source: roofline, Williams et al., CACM 52(4), 2009.
    """
    refuse_parts(model, "estimate")
    if not isinstance(device, Device):
        raise UsageError(
            f"estimate: device is {device!r}: expected a pycoll.topology.Device, such as "
            "topology.load('cluster.toml').device"
        )
    with without_values():
        made, kept = on_meta(model), Kept()
        recompute_layers(made, recompute, pp, Positions(), kept)
        batch, target = like(x), like(y)
        args, kwargs = as_call(batch)
        known = [*made.parameters(), *made.buffers(), *tensors_in([args, kwargs, target])]
        with Saved(known) as saved:
            kept.note = saved.note
            trace = record(made, batch, y=target, loss=loss)
    total, layers = Work(), defaultdict[str, Work](Work)
    operators = defaultdict[str, Work](Work)
    for operator in trace.operators:
        seconds = device.seconds(operator.flops, operator.nbytes)
        for work in (total, operators[operator.name], *(layers[n] for n in operator.layers)):
            work.add(operator, seconds)
    names = [name for name, _ in model.named_modules() if name in layers]
    weights = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    return Estimate(
        device,
        total,
        {name: layers[name] for name in names},
        dict(operators),
        sum(weights.values()),
        saved.nbytes,
        num_samples(x),
    )


def _bottleneck(of: Estimate) -> str:
    leaves = [name for name in of.by_layer if not _has_children(name, of.by_layer)]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in leaves:
        kinds[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)].append(name)
    if not kinds or not of.seconds:
        return "no layer takes time"
    times = {kind: sum(of.by_layer[n].total_s for n in names) for kind, names in kinds.items()}
    kind = max(times, key=lambda kind: times[kind])
    of_kind = [of.by_layer[name] for name in kinds[kind]]
    flops = sum(work.total_flops for work in of_kind)
    nbytes = sum(sum(work.nbytes.values()) for work in of_kind)
    compute_s = flops / (of.device.flops_per_s * of.device.attained)
    by_memory = nbytes / of.device.memory_bytes_per_s
    if max(compute_s, by_memory) < times[kind] / 2:
        bound, advice = "the start of its operators", "give it more samples at a time"
    elif compute_s >= by_memory:
        bound, advice = "arithmetic", "split it by samples (dp), or by columns and rows (tp)"
    else:
        bound, advice = "memory traffic", "split it by samples (dp), or fuse it with its neighbors"
    if of.parameters > of.activations:
        held = "weights are larger than activations: tp, pp or zero=3 save more memory"
    else:
        held = (
            "activations are larger than weights: dp, recompute or smaller microbatches save more"
        )
    return (
        f"bottleneck: {kind}, {times[kind] / of.seconds:.0%} of the time, bound by {bound}: "
        f"{advice}; {held}"
    )


def _has_children(name: str, names: Iterable[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in names)


__all__ = ["Estimate", "Work", "estimate"]
