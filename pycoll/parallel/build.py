"""parallelize: puts a plain module on a mesh, in place; names and types stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.context.sequence import Sequence
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.data.batch_norm import synchronise
from pycoll.parallel.data.reducer import Reducer
from pycoll.parallel.dropout.dropout import Positions, key_dropouts
from pycoll.parallel.dropout.functional_dropout import install
from pycoll.parallel.experts import share_experts
from pycoll.parallel.recompute import recompute_layers
from pycoll.parallel.tensor.layers import share_layers
from pycoll.parallel.tensor.plan import Style, match
from pycoll.parallel.tools import check_hooks
from pycoll.parallel.trainer.optimizers import attach
from pycoll.parallel.trainer.trainer import Trainer
from pycoll.parallel.trainer.update_policy import Updates, refuse
from pycoll.parallel.zero.zero_units import put_together_when_needed, units_of


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    tp: Mapping[str, str | Style] | None = None,
    pp: str | None = None,
    schedule: str = "1f1b",
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: str | bool | None = None,
    bucket_mb: float = 4.0,
    seed: int = 0,
    costs: list[float] | None = None,
) -> Any:
    """Puts a model on a mesh. Collective.

    Losses and weights equal those of one process on every mesh: `keyed_init` makes the initial
    weights (or any other way in which all ranks make the same model), dropout masks are keyed by
    place, means are exact to the token, and batch normalisation sees the batches of all replicas.

    Args:
        model: A plain module, identical on all ranks, with floating parameters of any dtype.
            16-bit parameters get float32 gradients and a float32 copy for the optimizer.
        mesh: The ranks.
        tp: The layers to share out over the axis tp: styles by patterns of layer names.
        pp: Name of the list of blocks that the axis pp cuts, such as "blocks"; the axis cp cuts
            the sequence at the first of these blocks.
        schedule: Name of a pipeline schedule of `pycoll.parallel.pipeline`. "pipedream" steps
            the optimizer within `model.step`, once for each microbatch.
        zero: What the replicas shard: 0 nothing, 1 the optimizer's state, 2 also gradients,
            3 also parameters.
        sequence_parallel: Also share out the activations between the layers that tp shares.
        recompute: Layers that compute again in backward: True or "full" for the blocks, or a
            pattern of layer names.
        bucket_mb: Size of gradient buckets, MiB.
        seed: Seed of the dropout masks.
        costs: Cost of each block, for cutting them into stages; None: all blocks cost the same.

    Returns:
        The model, with methods `step`, `no_sync` and `evaluate` (`Trainer`).

    Raises:
        UsageError: The plan names a layer that does not exist, heads do not divide, pp or cp > 1
            without a list of blocks, a layer works along the sequence under cp, the ZeRO level or
            the schedule does not exist, or the schedule does not support an option.
    """
    if zero not in (0, 1, 2, 3):
        raise UsageError(f"zero is {zero}, expected 0, 1, 2 or 3")
    if mesh.size("pp") > 1 and pp is None:
        raise UsageError(
            f"parallelize: pp={mesh.size('pp')} needs the name of the list of blocks to cut, for "
            "example pp='blocks'"
        )
    order = pipeline.build(
        schedule, mesh.size("pp"), mesh.size("pp"), pipeline.generator(schedule).default_stages
    )
    if order.updates:
        refuse(order.name, zero=zero, recompute=recompute)
    check_hooks.prepare(model)
    # A tied parameter keeps the first of its names in the whole model.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers = {name: number for number, name in enumerate(names.values())}
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    group = mesh.line("tp")
    styles = match(model, tp or {})
    positions = Positions(seed)
    sequence = Sequence(mesh.line("cp"), positions, group if sequence_parallel else None)
    sequence.cut(model, pp, staged=mesh.size("pp") > 1)
    experts = share_experts(
        model, mesh.line("ep"), styles if sequence_parallel and group.size > 1 else ()
    )
    styles = {name: styles[name] for name, _ in model.named_modules() if name in styles}
    shared = share_layers(model, styles, group, sequence_parallel, pp)
    inside = {} if group.size == 1 else shared.inside
    key_dropouts(model, positions, inside, group, sequence)
    install(model, positions, shared, styles, sequence)
    replicas = mesh.line_of_dp("ep", "cp")
    needs_barrier = synchronise(
        model, replicas, lambda: replicas if sequence.length else mesh.line_of_dp("ep")
    )
    recomputes = recompute_layers(model, recompute, pp, positions)
    units = units_of(model, pp) if zero == 3 else []
    stages = None
    if mesh.size("pp") > 1 and pp is not None:
        from pycoll.parallel.trainer.pipeline_step import Pipeline

        stages = Pipeline(
            model, mesh, pp, order, positions, costs=costs, split_backward=not recomputes
        )
    here = {names[id(parameter)]: parameter for parameter in model.parameters()}
    named = [(name, parameter) for name, parameter in here.items() if parameter.requires_grad]
    partial = shared.partial if group.size > 1 else set()

    # With sequence_parallel, ranks of tp have distinct tokens, which may choose other experts.
    distinct_tokens = shared.sequence and experts.some
    data_ranks = mesh.line_of_dp("ep", "cp", *(["tp"] if distinct_tokens else []))

    def group_of(parameter: nn.Parameter) -> AxisGroup:
        axes = ("cp",) if id(parameter) in experts.here else ("ep", "cp")
        return mesh.line_of_dp(*axes, *(["tp"] if id(parameter) in partial else []))

    def owned(name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        """Gives each element one owner; the ranks share many parameters out among themselves."""
        number = numbers[name]
        alone = zero > 0 or along.rank == number % along.size
        if id(parameter) not in shared.placements and id(parameter) not in partial:
            alone = alone and group.rank == number % group.size
        return alone and (stages is None or stages.cut.counts(name))

    groups = [members for _, members in units] or [set(names.values())]
    if stages is not None:
        groups = [of & members for of in stages.groups for members in groups]
    reducer = Reducer(
        named,
        group_of=group_of,
        everyone=experts.named_with(learning, here),
        owned=owned,
        placements=shared.placements,
        level=zero,
        groups=groups,
        bucket_bytes=int(bucket_mb * 2**20),
        late=() if stages is None else stages.cut.shared,
    )
    for module, members in units:
        mine = [bucket for bucket in reducer.buckets if bucket.slots[0].name in members]
        if stages is None:
            put_together_when_needed(module, mine, keep=module is model)
    placements = {
        name: shared.placements.get(id(parameter), Placement(tuple(parameter.shape)))
        for name, parameter in here.items()
    }
    updates = Updates(order.name, replicas, data_ranks, reducer) if order.updates else None
    trainer = Trainer(
        model,
        mesh,
        reducer,
        here,
        placements,
        positions,
        replicas=replicas,
        data_ranks=data_ranks,
        sequence=sequence,
        needs_barrier=needs_barrier or mesh.size("ep") > 1,
        pipeline=stages,
        updates=updates,
    )
    model.step = trainer.step  # type: ignore[assignment]
    model.evaluate = trainer.evaluate  # type: ignore[assignment]
    model.no_sync = trainer.no_sync  # type: ignore[assignment]
    attach(trainer)
    check_hooks.watch(trainer)
    return model
