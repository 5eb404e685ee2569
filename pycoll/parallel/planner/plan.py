"""Plans: the fastest layouts of a model on a cluster that fit its memory, and why others lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.build import parallelize
from pycoll.parallel.core.batches import num_samples
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.mesh import mesh as make_mesh
from pycoll.parallel.planner.blocks import find_blocks
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.flops import refuse_parts
from pycoll.parallel.planner.layout_space import KEPT, LayoutSpace
from pycoll.parallel.planner.layouts import Choices, Layout
from pycoll.parallel.planner.network import ALGORITHMS
from pycoll.parallel.planner.probe import measured_s, options_of
from pycoll.parallel.planner.reasons import gigabytes, table_of, why_not
from pycoll.parallel.planner.search import search_of
from pycoll.parallel.planner.step import Prediction
from pycoll.parallel.planner.trace import without_values
from pycoll.parallel.tools.auto_plan import auto_plan
from pycoll.topology import Topology, load


@dataclass(frozen=True, slots=True)
class Plan(Mapping[str, Any]):
    """The best layout of a search, and those behind it.

    As a mapping it has the arguments of `parallelize`, for
    `pc.parallelize(model, plan.mesh(), **plan)`.

    Attributes:
        model: The plain model.
        best: Predictions of the ten fastest layouts that fit, fastest first.
        why: One line for each other family of layouts: what it costs more, or why it cannot run.
        arguments: Arguments of `parallelize` that do not depend on the layout.
        cluster: The cluster.
        memory: Bytes that a rank may keep.
        tried: Number of layouts.
        measured_s: Measured seconds of a step of the first layouts, if they were probed.
    """

    model: nn.Module
    best: list[Prediction]
    why: list[str]
    arguments: dict[str, Any]
    cluster: Topology
    memory: int
    tried: int
    measured_s: dict[Layout, float] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """Number of microbatches for `model.step`."""
        return self.best[0].layout.microbatches

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh."""
        return self.best[0].layout.sizes

    def __getitem__(self, key: str) -> Any:
        return self._options()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options())

    def __len__(self) -> int:
        return len(self._options())

    def _options(self) -> dict[str, Any]:
        return {**self.arguments, **options_of(self.best[0])}

    def mesh(self) -> Mesh:
        """The mesh of the best layout, for the ranks of this job. Collective."""
        sizes: dict[str, Any] = self.sizes
        return make_mesh(**sizes)

    def apply(self) -> Any:
        """Puts the model on the mesh of the best layout. Collective.

        Returns:
            The model, as `parallelize` returns it. Call `model.step` with
            `microbatches=plan.microbatches`.

        Raises:
            UsageError: The job has another number of ranks than the plan.
        """
        return parallelize(self.model, self.mesh(), **self)

    def table(self) -> str:
        """The best layouts with time, memory, bubble and communication, and why others lost."""
        return table_of(self.best, self.cluster, self.memory, self.why, self.tried, self.measured_s)

    def plot(self, path: str | Path) -> None:
        """Draws the best layouts: computing, waiting and communicating, stacked."""
        from pycoll.parallel.planner.draw_plan import draw_plan

        draw_plan(self.best, path)


def plan(
    model: nn.Module,
    x: Any,
    *,
    world: int,
    cluster: Topology | str | Path,
    memory: int | None = None,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    search: str = "dp",
    choices: Choices | None = None,
    tp: Mapping[str, Any] | None = None,
    pp: str | None = None,
    precision: Any = None,
    moments: int = 2,
    algorithms: tuple[str, ...] = ALGORITHMS,
    overlap: bool = True,
    prefetch: bool = False,
    even: bool = False,
    seed: int = 0,
    probe: int = 0,
) -> Plan:
    """Finds the fastest layout of a model on a cluster, without ranks and without values.

    Args:
        model: The model before `parallelize`; it may be on the device "meta".
        x: The batch of a step of all replicas; only shapes and dtypes matter, so it may be on the
            device "meta", too.
        world: Number of ranks.
        cluster: A cluster with a device, or its TOML file (docs/simulation.md); the first ranks are
            used.
        memory: Bytes that a rank may keep; None: the capacity of the device.
        y: Targets of `x`, for `loss`.
        loss: As in `step`; None: the loss costs nothing.
        search: "exhaustive" simulates every layout; "dp" finds the same ten, and simulates those
            that a bound does not rule out; "mcmc" and "recursive" see a part of them.
        choices: What to choose from; None: every ZeRO level, schedule and kind of recomputation
            that `Choices` lists.
        tp: Plan of tensor parallelism; None: `auto_plan` finds one.
        pp: Name of the list of blocks; None: the longest list of equal layers.
        precision: As in `parallelize`.
        moments: Numbers that the optimizer keeps per parameter.
        algorithms: Algorithms of collectives: "ring", "hierarchical".
        overlap: Whether gradients are reduced during the backward pass; `parallelize` does so.
        prefetch: Whether ZeRO 3 gathers weights while it computes; `parallelize` does not.
        even: Whether all stages have equally many blocks; `parallelize` balances their costs.
        seed: Seed of "mcmc".
        probe: Number of layouts, the fastest ones, that are run for three steps each, on ranks of
            this host; then the one that is measured to be fastest comes first. `world` should be
            no more than the cores.

    Returns:
        The plan.

    Raises:
        UsageError: The model cannot be traced, no layout fits into the memory, or the cluster is
            too small or has no device; the message says what would fit.

    Cost: a quarter of a second for each size of tp, cp and microbatch that bounds do not rule out,
        in forked processes, one for each core, if this one has no other threads, communicators
        with other ranks, or devices; and a millisecond for each layout.
    Source: docs/planning.md lists the papers.
    """
    refuse_parts(model, "plan")
    run = search_of(search)
    placed = load(cluster) if isinstance(cluster, (str, Path)) else cluster
    device = placed.device
    if device is None:
        raise UsageError(
            f"plan: cluster {placed.name!r} has no device: add a table [device] to its file "
            "(docs/planning.md), or let `pycoll calibrate` write one"
        )
    limit = memory or device.capacity_bytes
    if limit is None:
        raise UsageError(
            f"plan: the memory of a rank is not known: give memory=, or capacity_gb to the device "
            f"{device.name!r}"
        )
    if world < 1 or num_samples(x) < 1:
        raise UsageError(f"plan: {world} ranks, {num_samples(x)} samples, expected 1 or more")
    if not 0 <= probe <= KEPT:
        raise UsageError(f"plan: probe is {probe}, expected 0 to {KEPT} layouts")
    blocks = pp if pp is not None else find_blocks(model)
    shared = dict(tp) if tp is not None else _tp_plan(model, x)
    model_costs = CostModel(
        model,
        x,
        placed,
        y=y,
        loss=loss,
        tp=shared,
        blocks=blocks,
        precision=precision,
        moments=moments,
        algorithms=algorithms,
        overlap=overlap,
        prefetch=prefetch,
        even=even,
    )
    with without_values(), model_costs.workers():
        model_costs.check()
        space = LayoutSpace(model_costs, world, limit, choices or Choices())
        found = run(space, seed=seed) if search == "mcmc" else run(space)
        if found is None:
            raise UsageError(_nothing_fits(space, limit))
        ranked = space.ranked()
    arguments = {"tp": shared, "pp": blocks, "precision": precision}
    best, measured = ranked[:KEPT], dict[Layout, float]()
    for of in best[:probe]:
        measured[of.layout] = measured_s(
            model, x, of, y=y, loss=loss, moments=moments, arguments=arguments
        )
    best[:probe] = sorted(best[:probe], key=lambda of: measured[of.layout])
    with without_values(), model_costs.workers():
        why = why_not(space, best[0])
    return Plan(model, best, why, arguments, placed, limit, space.tried, measured)


def _tp_plan(model: nn.Module, x: Any) -> dict[str, Any]:
    """The plan that `auto_plan` finds; empty if there is none."""
    import io

    try:
        return auto_plan(model, x, file=io.StringIO())
    except UsageError:
        return {}


def _nothing_fits(space: LayoutSpace, limit: int) -> str:
    found = space.smallest()
    if found is None:
        reasons = [str(of) for of in space.known.values() if isinstance(of, UsageError)]
        return f"plan: no layout of {space.world} ranks can run: {(reasons or ['none'])[0]}"
    ranks = space.world * math.ceil(found.memory / limit)
    return (
        f"plan: no layout of {space.world} ranks fits into {gigabytes(limit)} a rank: the smallest "
        f"one, {found.layout}, needs {gigabytes(found.memory)}: give it that much, or about "
        f"{ranks} ranks"
    )


__all__ = ["Plan", "plan"]
