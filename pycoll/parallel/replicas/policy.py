"""The switch `replicas=`: what keeps the replicas of a parallelized model together."""

from __future__ import annotations

import inspect
import typing
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import optim

from pycoll import environment
from pycoll.errors import UsageError
from pycoll.parallel import graph as graphs
from pycoll.parallel.core.lateness import Late
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.ps.filters import Int8Feedback
from pycoll.parallel.replicas.gossip import gossip
from pycoll.parallel.replicas.local_steps import diloco
from pycoll.parallel.replicas.optimizer import ReplicaOptimizer
from pycoll.parallel.replicas.served import Served
from pycoll.parallel.trainer.update_policy import UpdatePolicy

# Makes the optimizer of one replica exchange with the others of the group.
Connect = Callable[[optim.Optimizer, AxisGroup], optim.Optimizer]
TOGETHER = "allreduce"


def connect_by_gossip(
    optimizer: optim.Optimizer,
    group: AxisGroup,
    graph: str = "exponential",
    mode: str = "dpsgd",
    compress: str | None = None,
) -> optim.Optimizer:
    """Gossip over a graph of `pc.graph` that takes the number of replicas alone."""
    makers = {"complete", "exponential", "one_peer_exponential", "path", "ring", "star"}
    if graph not in makers:
        raise UsageError(
            f"replicas: graph={graph!r}, expected one of {', '.join(sorted(makers))}, or "
            "replicas=lambda optimizer, group: pc.gossip(optimizer, graph, group=group)"
        )
    return gossip(
        optimizer, getattr(graphs, graph)(group.size), mode, compress=compress, group=group
    )


def connect_by_local_steps(
    optimizer: optim.Optimizer,
    group: AxisGroup,
    steps: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compress: str | None = None,
    fragments: int = 1,
    overlap: int = 0,
) -> optim.Optimizer:
    """DiLoCo; with outer_lr=1 and outer_momentum=0, local SGD."""
    return diloco(
        optimizer,
        steps,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        compress=compress,
        fragments=fragments,
        overlap=overlap,
        group=group,
    )


def connect_by_servers(
    optimizer: optim.Optimizer,
    group: AxisGroup,
    mode: str = "sync",
    servers: int = 1,
    staleness: int | None = None,
    k: int | None = None,
    backup: int = 0,
    copies: int = 1,
    damping: bool = False,
    max_staleness: int | None = None,
    compress: str | None = None,
) -> optim.Optimizer:
    """A parameter server on the first replicas; `compress=int8` rounds gradients."""
    if compress not in (None, "int8"):
        raise UsageError(f"replicas='ps': compress={compress!r}, expected 'int8'")
    options = {
        "mode": mode,
        "servers": servers,
        "staleness": staleness,
        "k": k,
        "backup": backup,
        "copies": copies,
        "damping": damping,
        "max_staleness": max_staleness,
        "filters": [] if compress is None else [Int8Feedback()],
    }
    return Served(optimizer, group, options)


KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "gossip": connect_by_gossip,
    "local": connect_by_local_steps,
    "ps": connect_by_servers,
}


def connect_of(replicas: str | Connect) -> Connect | None:
    """What the user's `replicas=` asks for; None: one batch, one model. PYCOLL_REPLICAS overrides.

    Raises:
        UsageError: The text names no kind, or an option that the kind does not have.
    """
    replicas = environment.read("PYCOLL_REPLICAS") or replicas
    if not isinstance(replicas, str):
        return replicas
    kind, _, text = replicas.partition(":")
    if kind == TOGETHER and not text:
        return None
    if kind not in KINDS:
        raise UsageError(
            f"replicas={replicas!r}: expected {TOGETHER!r}, {', '.join(map(repr, KINDS))}, with "
            "options such as 'local:steps=50,compress=int8', or a function of an optimizer and a "
            "group"
        )
    make, options = KINDS[kind], _options(replicas, KINDS[kind], text)
    return lambda optimizer, group: make(optimizer, group, **options)


def _options(replicas: str, make: Callable[..., Any], text: str) -> dict[str, Any]:
    hints = typing.get_type_hints(make)
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = _READERS[hints[name] if name in known else None](value)
        except (ValueError, LookupError):
            expected = ", ".join(f"{key}={value}" for key, value in known.items())
            raise UsageError(
                f"replicas={replicas!r}: {part!r} is no option; options: {expected}"
            ) from None
    return found


def _text(value: str) -> str:
    if not value:
        raise ValueError("no value")
    return value


# How the value of an option is read, by the annotation of the parameter.
_READERS: dict[Any, Callable[[str], Any]] = {
    str: _text,
    str | None: _text,
    int: int,
    int | None: int,
    float: float,
    bool: lambda value: {"0": False, "1": True}[value],
}


class Apart(UpdatePolicy):
    """Each replica steps by its own gradients; its optimizer exchanges with the others."""

    steps_alone = False

    def __init__(
        self, connect: Connect, group: AxisGroup, ranks: Sequence[int], reducer: Reducer
    ) -> None:
        """Takes the replicas.

        Args:
            connect: Makes an optimizer exchange with those of the other replicas.
            group: The replicas.
            ranks: The ranks of `group` in the mesh.
            reducer: The gradients.
        """
        super().__init__(reducer)
        self._connect, self._group, self._ranks = connect, group, ranks
        # Not kept alive: parameter servers end with the script's last use of their optimizer.
        self._optimizer: Callable[[], ReplicaOptimizer | None] = lambda: None

    def take(self, optimizer: optim.Optimizer, clip: float | None) -> optim.Optimizer:
        """Connects the optimizer with those of the other replicas."""
        made = self._connect(optimizer, self._group)
        if isinstance(made, ReplicaOptimizer):
            self._optimizer = weakref.ref(made)
        return made

    def skip(self, optimizer: optim.Optimizer) -> None:
        """Exchanges without gradients: other replicas do not skip, and would wait.

        Servers take the gradients of this replica as zeros.
        """
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        optimizer.step()

    def worked(self, busy_s: Sequence[float]) -> None:
        """Tells the optimizer, which may tell other replicas."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.busy_s = busy_s

    def late(self, here: Late | None) -> Late | None:
        """The late one of the ranks with this part of a replica, if the optimizer knows."""
        optimizer = self._optimizer()
        found = None if optimizer is None else optimizer.late
        return here if found is None else replace(found, rank=self._ranks[found.rank])


__all__ = ["KINDS", "TOGETHER", "Apart", "Connect", "connect_of"]
