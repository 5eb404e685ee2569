"""Finds the ranks of a model's modules, for `parallelize(place=)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import as_call
from pycoll.parallel.core.meta_model import on_meta
from pycoll.parallel.core.patterns import names_matching
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.place.graph import CallGraph, Tracer
from pycoll.parallel.features.place.places import ranks_of
from pycoll.parallel.planner.estimate import estimate
from pycoll.parallel.planner.network import Network
from pycoll.parallel.planner.operator_graph import Edge
from pycoll.parallel.planner.placed_graph import Moves, PlacedGraph, Places, Task
from pycoll.parallel.planner.search import search_of
from pycoll.parallel.planner.trace import like, without_values
from pycoll.topology import Topology, load

_SEARCHES = ("mcmc", "exhaustive")


def auto_place(
    model: nn.Module,
    x: Any,
    *,
    world: int,
    cluster: Topology | str | Path,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    modules: str | None = None,
    search: str = "mcmc",
    seed: int = 0,
) -> dict[str, int]:
    """Places the modules of a model on ranks so that a step takes least time, and prints where.

    Args:
        model: The model before `parallelize`; it may be on the device "meta".
        x: A batch as for `model.step`; only shapes and dtypes matter.
        world: Number of ranks of the axis pp. Each gets a module that learns.
        cluster: A cluster with a device, or its TOML file (docs/simulation.md).
        y: Targets of `x`, for `loss`.
        loss: As in `step`; None: the loss costs nothing.
        modules: Pattern of the names of the modules to place; None: the model's children, and the
            items of lists.
        search: "mcmc", or "exhaustive" for all places.
        seed: Seed of "mcmc".

    Returns:
        The rank of each module that the forward calls, by name, for `parallelize(place=)`. Modules
        that share a parameter have one rank.

    Raises:
        UsageError: The model cannot be traced, there are fewer modules than ranks, or the cluster
            is too small or has no device.

    Cost: one pass through the model without values, and for "mcmc" 8,000 simulated steps, each of
        some microseconds for each call of the forward.
    Source: FlexFlow, Jia, Zaharia, Aiken, SysML 2019.
    """
    if search not in _SEARCHES:
        raise UsageError(f"auto_place: search is {search!r}, expected {' or '.join(_SEARCHES)}")
    placed = load(cluster) if isinstance(cluster, (str, Path)) else cluster
    device = placed.device
    if device is None:
        raise UsageError(f"auto_place: cluster {placed.name!r} has no device: add a table [device]")
    graph = _traced(model, x, modules)
    layers = estimate(model, x, device, y=y, loss=loss).by_layer
    times = {name: of.seconds for name, of in layers.items()}
    network = Network(placed, {"pp": world})
    space = _Space.of(model, graph, _nbytes(model, graph, x), times, world, network)
    run = search_of(search)
    found: Any = run(space, seed=seed) if search == "mcmc" else run(space)
    if found is None:
        raise UsageError(
            f"auto_place: no places of {len(space.groups)} modules leave none of {world} ranks "
            "without a parameter that learns: take fewer ranks, or name smaller modules"
        )
    place = space.place(found)
    alone_s = sum(task.forward_s + task.backward_s for task in space.graph.nodes)
    together_s = space.cost(found)
    lines = [
        f"a step on {world} ranks: {together_s * 1e3:.3g} ms, on one rank: {alone_s * 1e3:.3g} ms"
    ]
    for rank in range(world):
        lines.append(f"rank {rank}: {', '.join(n for n, r in place.items() if r == rank)}")
    print("\n".join(lines))
    return place


@dataclass(slots=True)
class _Space:
    """The ranks of groups of modules; functions between modules follow from them.

    Attributes:
        calls: The calls of the forward.
        nodes: The calls that are tasks.
        graph: The tasks.
        groups: Modules that have one rank; a point has a rank for each group.
        learns: The groups with a parameter that learns.
    """

    calls: CallGraph
    nodes: list[fx.Node]
    graph: PlacedGraph
    groups: list[list[str]]
    learns: list[int]
    _known: dict[Places, float] = field(default_factory=dict)  # a walk comes to points again

    @classmethod
    def of(
        cls,
        model: nn.Module,
        calls: CallGraph,
        nbytes: dict[fx.Node, int],
        times: dict[str, dict[str, float]],
        world: int,
        network: Network,
    ) -> _Space:
        """Makes the tasks of a forward.

        Args:
            model: The model.
            calls: The calls of its forward.
            nbytes: Bytes of their results.
            times: Seconds of each module by pass, of all of its calls.
            world: Number of ranks.
            network: The cluster's links.
        """
        ranked = ranks_of(calls, lambda name, near: 0, {})
        nodes = [node for node in calls.nodes if ranked[node] is not None]
        numbers = {node: i for i, node in enumerate(nodes)}
        often = [str(node.target) for node in nodes if node.op == "call_module"]
        tasks = []
        for node in nodes:
            name = str(node.target) if node.op == "call_module" else ""
            of = times.get(name, {})
            count = max(often.count(name), 1)
            back_s = of.get("backward", 0.0) + of.get("recomputed", 0.0)
            tasks.append(Task(node.name, of.get("forward", 0.0) / count, back_s / count))
        edges = [
            Edge(numbers[each], numbers[node], nbytes.get(each, 0), ())
            for node in nodes
            for each in node.all_input_nodes
            if each in numbers
        ]
        latency_s, per_gb_s = network.message_s(0, "pp"), network.message_s(1e9, "pp")
        rate = 1e9 / (per_gb_s - latency_s) if per_gb_s > latency_s else math.inf
        graph = PlacedGraph(tuple(tasks), tuple(edges), world, latency_s, rate)
        groups = _groups(model, list(dict.fromkeys(often)))
        learns = [
            i
            for i, names in enumerate(groups)
            if any(
                p.requires_grad for name in names for p in model.get_submodule(name).parameters()
            )
        ]
        return cls(calls, nodes, graph, groups, learns)

    def place(self, point: Places) -> dict[str, int]:
        """The rank of each module, in the order of their first calls."""
        found = {
            name: rank for names, rank in zip(self.groups, point, strict=True) for name in names
        }
        order = [str(node.target) for node in self.nodes if node.op == "call_module"]
        return {name: found[name] for name in dict.fromkeys(order)}

    def cost(self, point: Places) -> float:
        """Seconds of a step; infinity if a rank has no parameter that learns."""
        if point not in self._known:
            self._known[point] = self._cost(point)
        return self._known[point]

    def _cost(self, point: Places) -> float:
        if len({point[i] for i in self.learns}) < self.graph.world:
            return math.inf
        place = self.place(point)
        ranks = ranks_of(self.calls, lambda name, near: place[name], {})
        return self.graph.cost(tuple(rank for n in self.nodes if (rank := ranks[n]) is not None))

    def points(self) -> Iterator[Places]:
        """All ranks of all groups."""
        return product(range(self.graph.world), repeat=len(self.groups))

    def start(self) -> Places:
        """Groups in turn, in the order of the forward."""
        ranks = [0] * len(self.groups)
        for turn, i in enumerate(self.learns):
            ranks[i] = turn * self.graph.world // len(self.learns)
        return tuple(ranks)

    def neighbors(self, point: Places) -> Sequence[Places]:
        """Points that differ in one group."""
        return Moves(point, self.graph.world)


def _traced(model: nn.Module, x: Any, modules: str | None) -> CallGraph:
    names = [name for name, _ in model.named_modules() if name]
    if modules is None:
        names = list(_units(model, ""))
    else:
        names = names_matching(modules, names, "auto_place", f"module of {type(model).__name__}")
    args, kwargs = as_call(x)
    return Tracer(model, names).trace(args, kwargs, training=True)


def _units(model: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _groups(model: nn.Module, names: list[str]) -> list[list[str]]:
    """Modules that share a parameter, together."""
    groups: list[tuple[set[int], list[str]]] = []
    for name in names:
        ids = {id(p) for p in model.get_submodule(name).parameters()}
        shared = [group for group in groups if group[0] & ids]
        groups = [group for group in groups if group not in shared]
        of_shared = [each for _, members in shared for each in members]
        groups.append((ids.union(*(group[0] for group in shared)), [*of_shared, name]))
    return [members for _, members in groups]


class _Sizes(fx.Interpreter):
    """Runs a graph without values, and keeps the bytes of each result."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.nbytes: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.nbytes[n] = sum(each.nbytes for each in tensors_in(result))
        return result


def _nbytes(model: nn.Module, calls: CallGraph, x: Any) -> dict[fx.Node, int]:
    with without_values():
        copy = on_meta(model)
        for name, constant in calls.constants.items():
            setattr(copy, name, like(constant))
        sizes = _Sizes(copy, calls.output.graph)
        samples = [
            each for each in _pytree.tree_leaves(as_call(like(x))) if isinstance(each, Tensor)
        ]
        sizes.run(*samples)
    return sizes.nbytes


__all__ = ["auto_place"]
