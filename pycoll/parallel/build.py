"""parallelize: puts a plain module on a mesh, in place; names and types stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.deferred import values_of, without_memory
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.features.annotate.annotations import Annotations
from pycoll.parallel.features.annotate.feature import Annotated
from pycoll.parallel.features.batch_norm import SyncBatchNorm
from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.data.feature import DataParallel
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.features.dropout.feature import KeyedDropout
from pycoll.parallel.features.experts import ExpertParallel
from pycoll.parallel.features.feature import Build, Feature, Options, beside_dp
from pycoll.parallel.features.float8 import Float8
from pycoll.parallel.features.pipeline import PipelineParallel
from pycoll.parallel.features.place.feature import PlaceParallel
from pycoll.parallel.features.precision import MixedPrecision, Precision
from pycoll.parallel.features.recompute import Keep, Recompute
from pycoll.parallel.features.tensor.feature import TensorParallel
from pycoll.parallel.features.tensor.plan import Style
from pycoll.parallel.features.zero.feature import Zero
from pycoll.parallel.planner import script
from pycoll.parallel.replicas.policy import TOGETHER, Apart, Connect, connect_of
from pycoll.parallel.tools import check_hooks
from pycoll.parallel.trainer.executors import Executor, Pipelined, Plain
from pycoll.parallel.trainer.passes import FixedOrder, check_fixed_order
from pycoll.parallel.trainer.placed import PlacedExecutor
from pycoll.parallel.trainer.plain_loop import attach
from pycoll.parallel.trainer.state_dicts import guard
from pycoll.parallel.trainer.trainer import Trainer
from pycoll.parallel.trainer.update_policy import UpdatePolicy, WithinStep

# What `parallelize` does to a model, one after the other; `Feature.after` says what needs what.
ORDER: tuple[type[Feature], ...] = (
    ContextParallel,
    ExpertParallel,
    TensorParallel,
    Annotated,
    KeyedDropout,
    SyncBatchNorm,
    MixedPrecision,
    Float8,
    Recompute,
    Zero,
    PipelineParallel,
    PlaceParallel,
    DataParallel,
)


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    tp: Mapping[str, str | Style] | None = None,
    pp: str | None = None,
    schedule: str = "1f1b",
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: str | bool | Keep | None = None,
    bucket_mb: float = 4.0,
    seed: int = 0,
    costs: list[float] | None = None,
    precision: str | Precision | None = None,
    zero_group: int | None = None,
    replicas: str | Connect = TOGETHER,
    annotate: Annotations | None = None,
    place: Mapping[str, int] | None = None,
) -> Any:
    """Puts a model on a mesh. Collective.

    Losses and weights equal those of one process on every mesh: `keyed_init` makes the initial
    weights (or any other way in which all ranks make the same model), dropout masks are keyed by
    place, means are exact to the token, and batch normalisation sees the batches of all replicas.

    Args:
        model: A plain module, identical on all ranks, with floating parameters of any dtype.
            16-bit parameters get float32 gradients and a float32 copy for the optimizer. It is on
            the mesh's device, or on the CPU or "meta": then each rank's part is placed there.
        mesh: The ranks.
        tp: The layers to share out over the axis tp: styles by patterns of layer names.
        pp: Name of the list of blocks that the axis pp cuts, such as "blocks"; the axis cp cuts
            the sequence at the first of these blocks.
        schedule: Name of a pipeline schedule of `pycoll.parallel.pipeline`. "pipedream" and its
            variants step the optimizer within `model.step`, after one or a few microbatches.
        zero: What the replicas shard: 0 nothing, 1 the optimizer's state, 2 also gradients,
            3 also parameters.
        sequence_parallel: Also share out the activations between the layers that tp shares.
        recompute: Layers that compute again in backward: True or "full" for the blocks, a pattern
            of layer names, "selective" for the blocks without their products with weights, or a
            `Keep` with the operators whose results are kept.
        bucket_mb: Size of gradient buckets, MiB.
        seed: Seed of the dropout masks.
        costs: Cost of each block, for cutting them into stages; None: all blocks cost the same.
        precision: "bf16", "fp16", "fp32", "fp8" (bf16 with products of linear layers in 8 bits) or
            a `Precision`: weights and activations of this dtype, with norms, losses, sums of
            gradients and the optimizer's weights in float32. None: the dtypes that the model has.
            `pycoll check` computes in float64 in any case.
        zero_group: Number of neighbouring replicas that shard what `zero` says; groups of them have
            copies (hybrid sharding). None: all replicas.
        replicas: How the ranks of the axis dp stay together. "allreduce": as one model that
            learns one batch. "gossip": each steps alone and averages with neighbors. "local": each
            steps alone, and all average now and then. "ps": each pushes gradients to a parameter
            server. With options: "gossip:graph=ring,mode=sgp", "local:steps=50,compress=int8",
            "ps:mode=ssp,staleness=3". Or a function of the torch optimizer and the AxisGroup
            of the replicas that returns an optimizer.
        annotate: Shardings of a few tensors, by `pc.annotate`, in place of `tp`: the shardings of
            all others, and the collectives, follow from them.
        place: Ranks of the axis pp by patterns of module names, in place of `pp`, such as
            {"tower_a": 0, "tower_b": 1}: docs/planning.md has the ranks of all other modules.

    Returns:
        The model, with methods `step`, `no_sync` and `evaluate` (`Trainer`).

    Raises:
        UsageError: The plan names a layer that does not exist, heads do not divide, pp or cp > 1
            without a list of blocks, a layer works along the sequence under cp, the ZeRO level or
            the schedule does not exist, or the schedule does not support an option.
    """
    connect, make_policy = connect_of(replicas), None
    if connect is not None and mesh.size("dp") > 1:
        make_policy = partial(Apart, connect, mesh.line("dp"), mesh.ranks_along("dp"))
        mesh, seed = mesh.one_replica(), seed + 1_000_003 * mesh.rank("dp")  # masks of its own
    if check_hooks.prepare(model):
        precision = None
    plain = script.plain_copy(model)
    without_memory(model, mesh.device)
    options = Options(
        tp or {},
        pp,
        schedule,
        zero,
        sequence_parallel,
        recompute,
        costs,
        precision,
        zero_group,
        annotate=annotate,
        place=place,
    )
    build = Build(model, mesh, options, Positions(seed))
    apply_all(build)
    trainer = _train(build, mesh, int(bucket_mb * 2**20), make_policy)
    model.step = trainer.step  # type: ignore[assignment]
    model.evaluate = trainer.evaluate  # type: ignore[assignment]
    model.no_sync = trainer.no_sync  # type: ignore[assignment]
    attach(trainer)
    guard(trainer)
    check_hooks.watch(trainer)
    script.intercept(model, plain, tp=tp, pp=pp, recompute=recompute, precision=precision)
    return model


def apply_all(build: Build, *, meta: bool = False) -> None:
    """Applies all features to a model, in place; `meta`: to one without values.

    Raises:
        UsageError: A feature refuses the options, before the model has changed, or the model.
    """
    build.features.update((kind, kind(build)) for kind in ORDER)
    for feature in build.features.values():
        feature.apply_meta() if meta else feature.apply()


def check_order(order: Sequence[type[Feature]]) -> None:
    """Checks that each feature comes behind those that it needs.

    Raises:
        ValueError: One does not.
    """
    for i, kind in enumerate(order):
        for needed in kind.after:
            if needed not in order[:i]:
                raise ValueError(f"{kind.__name__} needs {needed.__name__} before it")


check_order(ORDER)


def _train(
    build: Build,
    mesh: Mesh,
    bucket_bytes: int,
    make_policy: Callable[[Reducer], UpdatePolicy] | None,
) -> Trainer:
    """Makes the trainer of a model to which all features have been applied."""
    model, features = build.model, build.features.values()
    here = {build.names[id(parameter)]: parameter for parameter in model.parameters()}
    for parameter in here.values():
        if not build.options.zero or not parameter.requires_grad:
            parameter.data = values_of(parameter).data  # buckets of ZeRO make the others
    parts = {id_: place for each in features for id_, place in each.placements().items()}
    reducer = build[DataParallel].make_reducer(mesh, here, parts, bucket_bytes)
    for each in features:
        each.attach(reducer.buckets)
    replicas = mesh.line_of_dp("ep", "cp")
    data_ranks = mesh.line_of_dp(*beside_dp(each.splits_tokens() for each in features))
    policy = _policy(build, mesh, reducer, replicas, data_ranks, make_policy)
    if mesh.virtual_replicas:
        check_fixed_order(
            model,
            mesh,
            reducer,
            apart=make_policy is not None,
            steps_within=policy.steps_within,
        )
    return Trainer(
        model,
        mesh,
        reducer,
        here,
        {name: parts.get(id(p), Placement(tuple(p.shape))) for name, p in here.items()},
        build.positions,
        replicas=replicas,
        data_ranks=data_ranks,
        sequence=build[ContextParallel].sequence,
        executor=_executor(build, mesh, reducer, policy),
        policy=policy,
        output=build[MixedPrecision].output,
    )


def _policy(
    build: Build,
    mesh: Mesh,
    reducer: Reducer,
    replicas: AxisGroup,
    data_ranks: AxisGroup,
    make_policy: Callable[[Reducer], UpdatePolicy] | None,
) -> UpdatePolicy:
    schedule = build[PipelineParallel].schedule
    if not schedule.updates:
        fixed = FixedOrder if mesh.virtual_replicas else UpdatePolicy
        return (make_policy or fixed)(reducer)
    if make_policy is not None:
        raise UsageError(
            f"parallelize: schedule {schedule.name!r} steps within model.step, where replicas "
            f"cannot exchange: take another schedule, or replicas={TOGETHER!r}"
        )
    return WithinStep(reducer, schedule.name, replicas, data_ranks)


def _executor(build: Build, mesh: Mesh, reducer: Reducer, policy: UpdatePolicy) -> Executor:
    model, positions = build.model, build.positions
    needs_barrier = any(each.needs_barrier for each in build.features.values())
    if (placed := build[PlaceParallel].placed) is not None:
        return PlacedExecutor(placed, mesh, reducer, positions, needs_barrier=needs_barrier)
    pipelined = build[PipelineParallel]
    if pipelined.cut is None:
        return Plain(model, reducer, positions, policy, mesh.ledger, needs_barrier=needs_barrier)
    return Pipelined(
        pipelined.cut,
        pipelined.schedule,
        mesh,
        reducer,
        positions,
        policy,
        needs_barrier=needs_barrier,
        split_backward=not build[Recompute].some,
    )
