"""Which rank of the axis pp runs each call of a model's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.patterns import names_matching
from pycoll.parallel.features.place.graph import CallGraph, Tracer

HOME = 0  # the rank of what is not named and has inputs of several ranks, or of none


class ModulePlaces:
    """The ranks of a model's modules. Printing it shows them.

    Attributes:
        modules: The rank of each module that the forward calls, by name, in the order of the calls.
        parameters: The rank of each parameter, by its first name.
    """

    def __init__(self, model: nn.Module, place: Mapping[str, int], world: int) -> None:
        """Places the modules of a model.

        Args:
            model: The model, before it changes.
            place: Ranks by patterns of module names. A name within another one goes before it.
            world: Number of ranks.

        Raises:
            UsageError: A name or a rank does not exist, the model cannot be traced, or modules on
                two ranks have one parameter, or a rank has none.
        """
        self._named = _named(model, place, world)
        self.tracer = Tracer(model, self._named)
        self.modules: dict[str, int] = {}
        self._bare: dict[str, int] = {}  # ranks of parameters that no called module has
        graphs = [self.tracer.first(training=True), self.tracer.first(training=False)]
        self._check_called(graphs[0], model)
        self.parameters: dict[str, int] = {}
        users: dict[str, str] = {}
        for graph in graphs:
            for node, rank in self.ranks(graph).items():
                for name in graph.parameters[node]:
                    assert rank is not None
                    user = str(node.target)
                    if self.parameters.setdefault(name, rank) != rank:
                        raise UsageError(
                            f"place: {users[name]} on rank {self.parameters[name]} and {user} on "
                            f"rank {rank} have one parameter, {name}: place them on one rank"
                        )
                    users.setdefault(name, user)
        for name, _ in model.named_parameters():
            self.parameters.setdefault(name, HOME)  # the forward does not use it
        learning = {self.parameters[n] for n, p in model.named_parameters() if p.requires_grad}
        if idle := set(range(world)) - learning:
            raise UsageError(
                f"place: rank {min(idle)} of pp={world} has no parameter that learns: place a "
                "module on it, or make pp smaller"
            )

    def ranks(self, graph: CallGraph) -> dict[fx.Node, int | None]:
        """The rank of each node; None: functions of the batch alone, which any rank computes."""

        def of_module(name: str, inputs: int) -> int:
            return self.modules.setdefault(name, _rank_of(name, self._named, inputs))

        return ranks_of(graph, of_module, self._bare)

    def _check_called(self, graph: CallGraph, model: nn.Module) -> None:
        self.ranks(graph)
        for name in self._named:
            if not any(each == name or each.startswith(f"{name}.") for each in self.modules):
                raise UsageError(
                    f"place: the forward of {type(model).__name__} does not call {name!r}: leave "
                    "it out, or name a module that it calls"
                )

    def __str__(self) -> str:
        world = max(self.modules.values(), default=HOME) + 1
        lines = []
        for rank in range(world):
            names = [name for name, of in self.modules.items() if of == rank]
            lines.append(f"rank {rank}: {', '.join(names) or 'nothing'}")
        return "\n".join(lines)


def ranks_of(
    graph: CallGraph, of_module: Callable[[str, int], int], bare: dict[str, int]
) -> dict[fx.Node, int | None]:
    """The rank of each node; None: functions of the batch alone, which any rank computes.

    Args:
        graph: The calls.
        of_module: Returns a module's rank, from its name and the rank that its inputs suggest:
            their own if it is one, else HOME.
        bare: Ranks of parameters that functions use, by name: where they are first used. Those
            that are missing are added.
    """
    found: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        found[node] = None
        if node.op in ("placeholder", "get_attr"):
            continue
        inputs = node.all_input_nodes
        weights = [each for each in inputs if each.op == "get_attr" and graph.parameters[each]]
        ranks = {rank for each in inputs if (rank := found[each]) is not None}
        near = next(iter(ranks)) if len(ranks) == 1 else HOME
        if node.op == "call_module":
            found[node] = of_module(str(node.target), near)
        elif ranks or weights or node.op == "output":
            found[node] = near
        for each in weights:
            if found[each] is None:
                rank = found[node]
                assert rank is not None
                found[each] = bare.setdefault(graph.parameters[each][0], rank)
    return found


def check_names(model: nn.Module, place: Mapping[str, int]) -> dict[str, int]:
    """The rank of each module that a pattern names.

    Raises:
        UsageError: A pattern matches no module, or two give a module two ranks.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    what = f"module of {type(model).__name__}"
    found: dict[str, int] = {}
    for pattern, rank in place.items():
        for name in names_matching(pattern, names, "place", what):
            if found.setdefault(name, rank) != rank:
                raise UsageError(f"place: {name!r} is on ranks {found[name]} and {rank}: give one")
    return found


def _named(model: nn.Module, place: Mapping[str, int], world: int) -> dict[str, int]:
    for pattern, rank in place.items():
        if not isinstance(rank, int) or not 0 <= rank < world:
            raise UsageError(
                f"place: {pattern!r} is on rank {rank!r}, expected 0 to {world - 1}: pp={world}"
            )
    return check_names(model, place)


def _rank_of(name: str, named: Mapping[str, int], other: int) -> int:
    """The rank of the innermost named module that has a module, or is it."""
    parts: Sequence[str] = name.split(".")
    for end in range(len(parts), 0, -1):
        if (around := ".".join(parts[:end])) in named:
            return named[around]
    return other


__all__ = ["HOME", "ModulePlaces", "check_names", "ranks_of"]
