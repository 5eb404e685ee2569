"""Memory that a layout needs, from weights to activations, computed without running its ranks.

The training code itself shards and cuts the model, on tensors without storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.context.sequence import Sequence
from pycoll.parallel.core.batches import as_call
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import Loss
from pycoll.parallel.core.mesh import AXES, Mesh
from pycoll.parallel.data.buckets import share_length
from pycoll.parallel.data.reducer import in_axis_groups, main_dtype
from pycoll.parallel.dropout.dropout import Positions
from pycoll.parallel.dropout.functional_dropout import install
from pycoll.parallel.experts import share_experts
from pycoll.parallel.pipeline.schedules.simulate_pipeline import peak_live, peak_versions
from pycoll.parallel.pipeline.specs import replace
from pycoll.parallel.pipeline.stages import Notes, Tensors
from pycoll.parallel.recompute import recompute_layers
from pycoll.parallel.tensor.layers import share_layers
from pycoll.parallel.tensor.plan import Style, match
from pycoll.parallel.tensor.vocab import whole
from pycoll.parallel.tools.meta_model import Saved, meta_group, on_meta, without_values
from pycoll.parallel.zero.zero_units import units_of


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank keeps; temporary memory is not counted.

    Attributes:
        place: Place of the rank on the mesh, `{"pp": 0, "dp": 1, "ep": 0, ...}`.
        parameters: Bytes of its weights, of float32 copies of 16-bit weights, and of the versions
            that a schedule without a flush keeps.
        gradients: Bytes of the gradients, after they are reduced.
        optimizer: Bytes of the optimizer's state.
        activations: Peak bytes kept for backward; None if no sample was given.
    """

    place: dict[str, int]
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0)


def memory(
    model: nn.Module,
    mesh: Mesh | Mapping[str, int],
    *,
    tp: Mapping[str, str | Style] | None = None,
    pp: str | None = None,
    schedule: str = "1f1b",
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: str | bool | None = None,
    bucket_mb: float = 4.0,
    costs: list[float] | None = None,
    moments: int = 2,
    x: Any = None,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    microbatches: int = 1,
) -> list[RankMemory]:
    """Computes the memory of each rank of a layout, without ranks and without that memory.

    Args:
        model: A plain module; on the device "meta", it may be larger than this machine.
        mesh: The layout, such as {"dp": 4, "tp": 2}.
        tp: As in `parallelize`, like the next seven.
        pp: Name of the list of blocks.
        schedule: Name of the pipeline schedule.
        zero: ZeRO level.
        sequence_parallel: Also share out the activations between the layers.
        recompute: Layers that recompute their activations.
        bucket_mb: Size of gradient buckets, MiB.
        costs: Cost of each block.
        moments: Numbers that the optimizer keeps per parameter: 2 for Adam, 0 for plain SGD.
        x: Input of one microbatch of a replica; only shapes and dtypes matter. None: activations
            are not computed. Tokens are assumed to be spread evenly over the experts.
        y: Targets of `x`, for `loss`.
        loss: As in `step`; activations include what its backward needs.
        microbatches: Number of microbatches of a step.

    Returns:
        One entry per rank, in mesh order (tp fastest, pp slowest).

    Raises:
        UsageError: As for `parallelize`.

    Cost: one forward pass without arithmetic for each rank of tp and ep.
    """
    sizes = dict.fromkeys(AXES, 1) | dict(mesh.sizes if isinstance(mesh, Mesh) else mesh)
    if set(sizes) != set(AXES) or min(sizes.values()) < 1:
        raise UsageError(f"memory: mesh is {sizes}, expected sizes of {', '.join(AXES)}")
    if sizes["pp"] > 1 and pp is None:
        raise UsageError(
            f"memory: pp={sizes['pp']} needs the name of the list of blocks, pp='blocks'"
        )
    found: list[RankMemory] = []
    for expert, rank in itertools.product(range(sizes["ep"]), range(sizes["tp"])):
        with FakeTensorMode(allow_non_fake_inputs=True):
            meta = on_meta(model)
            group = meta_group("tp", rank, sizes["tp"])
            positions, styles = Positions(), match(meta, tp or {})
            ring = meta_group("cp", 0, sizes["cp"])  # all its ranks keep the same amount
            sequence = Sequence(ring, positions, group if sequence_parallel else None)
            sequence.cut(meta, pp, staged=sizes["pp"] > 1)
            parts = styles if sequence_parallel and group.size > 1 else ()
            experts = share_experts(meta, meta_group("ep", expert, sizes["ep"]), parts)
            styles = {name: styles[name] for name, _ in meta.named_modules() if name in styles}
            shared = share_layers(meta, styles, group, sequence_parallel, pp)
            if ring.size > 1:
                install(meta, positions, shared, styles, sequence)
            without_values(meta)
            recompute_layers(meta, recompute, pp, positions)
            units = [names for _, names in units_of(meta, pp)] if zero == 3 else None
            order = schedule if sizes["pp"] > 1 else None
            stages = _Stages(meta, order, sizes["pp"], microbatches, pp or "", costs)
            kept = None
            if x is not None:
                of_share = None if loss is None else sequence.of_shares(_of_whole(loss))
                kept = stages.kept(_fake(x), _fake(y), of_share)
            others = (range(sizes[axis]) for axis in ("pp", "dp", "cp"))
            for stage, replica, part in itertools.product(*others):
                place = {"pp": stage, "dp": replica, "ep": expert, "cp": part, "tp": rank}
                group_of = partial(_group_of, experts.here, shared.partial, place, sizes)
                weights, groups = stages.parameters(stage), stages.groups(stage, units)
                lasting = _lasting(weights, group_of, zero, groups, bucket_mb, moments)
                live = None if kept is None else stages.live(stage, kept)
                stashed = stages.stashed(stage)
                found.append(RankMemory(place, lasting[0] + stashed, *lasting[1:], live))
    return sorted(found, key=lambda rank: tuple(rank.place.values()))


class _Stages:
    """A meta model with all of its stages here."""

    def __init__(
        self,
        model: nn.Module,
        schedule: str | None,
        num_ranks: int,
        microbatches: int,
        blocks: str,
        costs: list[float] | None,
    ) -> None:
        self._model, self._cut, self._schedule = model, None, None
        if schedule is not None:
            self._schedule = pipeline.build(schedule, num_ranks, microbatches)
            num_stages = self._schedule.num_stages
            self._cut = pipeline.cut(model, blocks, num_stages, range(num_stages), costs=costs)

    def parameters(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Parameters of a rank's stages by name, in the order of the model."""
        named = dict(self._model.named_parameters())
        if self._cut is not None and self._schedule is not None:
            stages = self._schedule.stages_of(rank)
            here = set().union(*(self._cut.parameters_of(stage) for stage in stages))
            named = {name: parameter for name, parameter in named.items() if name in here}
        return list(named.items())

    def groups(self, rank: int, units: list[set[str]] | None) -> list[set[str]]:
        """Sets of parameter names that share buckets on a rank."""
        units = units or [{name for name, _ in self._model.named_parameters()}]
        if self._cut is None or self._schedule is None:
            return units
        own = [self._cut.own(stage) for stage in self._schedule.stages_of(rank)]
        return [of & names for of in [*own, set(self._cut.shared)] for names in units]

    def kept(self, x: Any, y: Any, loss: Callable[[Any, Any], Any] | None) -> list[int]:
        """Bytes that each stage keeps for a microbatch until its backward."""
        args, kwargs = as_call(x)
        known = [*self._model.parameters(), *self._model.buffers(), *args, *kwargs.values()]
        known = [tensor for tensor in [*known, y] if isinstance(tensor, Tensor)]
        num_stages = 1 if self._cut is None else self._cut.num_stages
        hidden: Tensors | None = None
        notes: Notes = {}
        found: list[int] = []
        for stage in range(num_stages):
            with Saved(known) as saved:
                if self._cut is None:
                    made = self._model(*args, **kwargs)
                else:
                    made = self._cut.forward(stage, args, kwargs, hidden, notes)
                if stage == num_stages - 1 and loss is not None:
                    loss(made, y)
            found.append(saved.nbytes)
            if stage < num_stages - 1:
                hidden = tuple(tensor.detach().requires_grad_() for tensor in made)
        return found

    def stashed(self, rank: int) -> int:
        """Bytes of the old versions of weights that a rank keeps."""
        if self._schedule is None or not self._schedule.updates:
            return 0
        learning = [w for _, w in self.parameters(rank) if w.requires_grad]
        nbytes = sum(weight.numel() * weight.element_size() for weight in learning)
        return nbytes * peak_versions(self._schedule.orders[rank])

    def live(self, rank: int, kept: list[int]) -> int:
        """Peak bytes that a rank keeps for microbatches that wait for their backward."""
        if self._schedule is None:
            return kept[0]
        return peak_live(self._schedule.orders[rank], kept)


def _lasting(
    weights: list[tuple[str, nn.Parameter]],
    group_of: Callable[[nn.Parameter], AxisGroup],
    zero: int,
    groups: list[set[str]],
    bucket_mb: float,
    moments: int,
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and the optimizer's state of a rank."""
    frozen = [parameter for _, parameter in weights if not parameter.requires_grad]
    parameters, gradients, state = sum(p.numel() * p.element_size() for p in frozen), 0, 0
    learning = [(name, parameter) for name, parameter in weights if parameter.requires_grad]
    for axis_group, members in in_axis_groups(
        learning,
        group_of,
        zero,
        groups,
        int(bucket_mb * 2**20),
    ):
        dtype = members[0][1].dtype
        main = main_dtype(dtype)
        count = sum(parameter.numel() for _, parameter in members)
        length = share_length(count, axis_group.size if zero else 1)
        full = length * (axis_group.size if zero else 1)
        parameters += (length if zero == 3 else full) * dtype.itemsize
        parameters += length * main.itemsize * (main != dtype)
        gradients += (length if zero >= 2 else full) * main.itemsize
        start = axis_group.rank * length if zero else 0
        state += max(0, min(count - start, length)) * main.itemsize * moments
    return parameters, gradients, state


def _group_of(
    experts: set[int],
    sums: set[int],
    place: Mapping[str, int],
    sizes: Mapping[str, int],
    parameter: nn.Parameter,
) -> AxisGroup:
    """The ranks over which a parameter's gradient is added up; `experts` and `sums` hold ids."""
    axes = ["dp", "cp"] if id(parameter) in experts else ["dp", "ep", "cp"]
    axes += ["tp"] if id(parameter) in sums else []
    lengths = tuple(sizes[axis] for axis in axes)
    rank = int(np.ravel_multi_index([place[axis] for axis in axes], lengths))
    return meta_group("+".join(axes), rank, math.prod(lengths))


def _of_whole(loss: Loss) -> Loss:
    """Returns a loss that gets whole outputs, unless it takes parts."""
    takes_parts = getattr(loss, "takes_parts", False)
    return lambda output, target: loss(output if takes_parts else whole(output), target)


def _fake(batch: Any) -> Any:
    return replace(batch, Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype))


__all__ = ["RankMemory", "memory"]
