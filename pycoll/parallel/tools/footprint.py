"""Memory that a layout needs, from weights to activations, computed without running its ranks.

The training code itself shards and cuts the model, on tensors without storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pycoll.errors import UsageError
from pycoll.parallel.build import apply_all
from pycoll.parallel.core.batches import as_call
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import of_whole
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.mesh_sizes import AXES
from pycoll.parallel.core.meta_model import MetaMesh, Saved, on_meta
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.specs import replace
from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.data.buckets import share_length
from pycoll.parallel.features.data.grouping import in_axis_groups
from pycoll.parallel.features.data.reducer import main_dtype
from pycoll.parallel.features.feature import Build, Options
from pycoll.parallel.features.pipeline import PipelineParallel
from pycoll.parallel.features.precision import Precision
from pycoll.parallel.features.recompute import Keep, Recompute
from pycoll.parallel.features.tensor.plan import Style
from pycoll.parallel.features.zero.feature import Zero
from pycoll.parallel.pipeline.schedules.simulate_pipeline import peak_live, peak_versions
from pycoll.parallel.pipeline.stages import Notes, Tensors


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
    recompute: str | bool | Keep | None = None,
    bucket_mb: float = 4.0,
    costs: list[float] | None = None,
    precision: str | Precision | None = None,
    zero_group: int | None = None,
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
        tp: As in `parallelize`, like the next nine.
        pp: Name of the list of blocks.
        schedule: Name of the pipeline schedule.
        zero: ZeRO level.
        sequence_parallel: Also share out the activations between the layers.
        recompute: Layers that recompute their activations.
        bucket_mb: Size of gradient buckets, MiB.
        costs: Cost of each block.
        precision: Dtypes.
        zero_group: Number of replicas that shard.
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
    options = Options(
        tp=tp or {},
        pp=pp,
        schedule=schedule,
        zero=zero,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        costs=costs,
        precision=precision,
        zero_group=zero_group,
        microbatches=microbatches,
    )
    found: list[RankMemory] = []
    for expert, rank in itertools.product(range(sizes["ep"]), range(sizes["tp"])):
        with FakeTensorMode(allow_non_fake_inputs=True):
            # All ranks of cp keep the same amount, and one pass finds that of all stages.
            grid = MetaMesh(sizes, {"ep": expert, "tp": rank})
            build = Build(on_meta(model), grid, options, Positions())
            apply_all(build, meta=True)
            stages = _Stages(build)
            kept = None
            if x is not None:
                sequence = build[ContextParallel].sequence
                of_share = None if loss is None else sequence.of_shares(of_whole(loss))
                kept = stages.kept(_fake(x), _fake(y), of_share)
            others = (range(sizes[axis]) for axis in ("pp", "dp", "cp"))
            for stage, replica, part in itertools.product(*others):
                place = {"pp": stage, "dp": replica, "ep": expert, "cp": part, "tp": rank}
                ranks_of = partial(build.group_of, MetaMesh(sizes, place))
                weights, groups = stages.parameters(stage), stages.groups(stage)
                kept_always = _lasting(
                    weights, ranks_of, build[Zero].share_of, zero, groups, bucket_mb, moments
                )
                live = None if kept is None else stages.live(stage, kept)
                stashed = stages.stashed(stage)
                found.append(RankMemory(place, kept_always[0] + stashed, *kept_always[1:], live))
    return sorted(found, key=lambda rank: tuple(rank.place.values()))


class _Stages:
    """A meta model with all of its stages here."""

    def __init__(self, build: Build) -> None:
        pipelined, self._recompute = build[PipelineParallel], build[Recompute]
        self._model, self._cut, self._pipelined = build.model, pipelined.cut, pipelined
        self._schedule = None if pipelined.cut is None else pipelined.schedule
        self._units = build[Zero].units() or [set(build.names.values())]

    def parameters(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Parameters of a rank's stages by name, in the order of the model."""
        named = dict(self._model.named_parameters())
        if self._cut is not None and self._schedule is not None:
            stages = self._schedule.stages_of(rank)
            here = set().union(*(self._cut.parameters_of(stage) for stage in stages))
            named = {name: parameter for name, parameter in named.items() if name in here}
        return list(named.items())

    def groups(self, rank: int) -> list[set[str]]:
        """Sets of parameter names that share buckets on a rank."""
        if self._cut is None:
            return self._units
        return [of & names for of in self._pipelined.units_of(rank) for names in self._units]

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
                self._recompute.kept.note = saved.note
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
        return nbytes * peak_versions(self._schedule.orders[rank], self._schedule.versions)

    def live(self, rank: int, kept: list[int]) -> int:
        """Peak bytes that a rank keeps for microbatches that wait for their backward."""
        if self._schedule is None:
            return kept[0]
        return peak_live(self._schedule.orders[rank], kept)


def _lasting(
    weights: list[tuple[str, nn.Parameter]],
    group_of: Callable[[nn.Parameter], AxisGroup],
    share_of: Callable[[AxisGroup], tuple[int, int]],
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
        num_shares, share = share_of(axis_group) if zero else (1, 0)
        of_bucket = bytes_of_bucket(
            count, dtype.itemsize, main.itemsize, num_shares, share, zero, moments
        )
        parameters += of_bucket[0]
        gradients += of_bucket[1]
        state += of_bucket[2]
    return parameters, gradients, state


def bytes_of_bucket(
    count: int, item: int, main: int, num_shares: int, share: int, zero: int, moments: int
) -> tuple[int, int, int]:
    """Bytes of the parameters, gradients and optimizer's state of a bucket.

    Args:
        count: Elements of the bucket.
        item: Bytes of an element.
        main: Bytes of an element of the optimizer's copy.
        num_shares: Number of ranks that share the bucket out.
        share: Number of this rank's share.
        zero: ZeRO level.
        moments: Numbers that the optimizer keeps per parameter.
    """
    length = share_length(count, num_shares)
    full = length * num_shares
    parameters = (length if zero == 3 else full) * item + length * main * (main != item)
    start = share * length
    state = max(0, min(count - start, length)) * main * moments
    return parameters, (length if zero >= 2 else full) * main, state


def _fake(batch: Any) -> Any:
    return replace(batch, Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype))


__all__ = ["RankMemory", "bytes_of_bucket", "memory"]
