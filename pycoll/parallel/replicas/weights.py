"""The parameters of an optimizer as one vector, and their exchange with neighbors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup, Started
from pycoll.parallel.core.transfers import receive
from pycoll.parallel.graph import Graph
from pycoll.parallel.replicas.times import NeighborTimes
from pycoll.work import Work

TIMES = 1  # tag of messages with times


class Weights:
    """Tensors read and written as one vector [count], of the widest dtype among them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.count = sum(x.numel() for x in self.tensors)
        kinds = [x.dtype for x in self.tensors] or [torch.float32]
        self.dtype = reduce(torch.promote_types, kinds)
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")

    def new(self, extra: int = 0) -> Tensor:
        """A vector of zeros, with `extra` elements behind the weights'."""
        return torch.zeros(self.count + extra, dtype=self.dtype, device=self.device)

    def read(self, into: Tensor) -> None:
        """Copies the tensors to the first elements of a vector."""
        place = 0
        for x in self.tensors:
            into[place : place + x.numel()].copy_(x.detach().reshape(-1))
            place += x.numel()

    def write(self, values: Tensor) -> None:
        """Copies the first elements of a vector to the tensors."""
        place = 0
        for x in self.tensors:
            x.detach().copy_(values[place : place + x.numel()].view(x.shape))
            place += x.numel()


class Neighbors:
    """Exchanges vectors along the edges of a graph, and times beside them.

    Attributes:
        times: How long each replica worked.
    """

    def __init__(self, group: AxisGroup, graph: Graph) -> None:
        if graph.size != group.size:
            raise UsageError(
                f"graph {graph.name} is of {graph.size} ranks, and there are {group.size} replicas"
            )
        own = group.comm.split(0)  # other messages of these ranks cannot be taken for ours
        assert own is not None
        self.graph = graph
        self.group = AxisGroup.over(own, group.axis, group.ledger, group.device)
        self.times = NeighborTimes(group.rank, group.size)
        self._into: dict[int, Tensor] = {}  # by source

    def start(self, step: int, vector: Tensor) -> Pending:
        """Starts sending a vector to the step's targets, and receiving those of its sources.

        The vector may change once the exchange has been waited for.
        """
        rank, comm = self.group.rank, self.group.comm
        sources, targets = (f(rank, step) for f in (self.graph.sources, self.graph.targets))
        for source in sources:
            known = self._into.get(source)
            if known is None or known.shape != vector.shape or known.dtype != vector.dtype:
                self._into[source] = torch.empty_like(vector)
        works = [
            Started(receive(comm, self._into[source], source), self.group, "recv")
            for source in sources
        ]
        works += [self.group.start("send", vector, vector, target) for target in targets]
        for target in targets:
            works.append(Started(self.send_times(target, comm), self.group, "times"))
        times = [self.times.message() for _ in sources]
        for source, into in zip(sources, times, strict=True):
            coming = comm.recv(into, source, TIMES, async_op=True)
            works.append(Started(coming, self.group, "times"))
        return Pending(works, {source: self._into[source] for source in sources}, times, self.times)

    def send_times(self, peer: int, comm: Communicator) -> Work:
        """Starts to send what this replica knows of the times of all."""
        message = self.times.message()
        self.group.count("times", message)
        sent: Work = comm.send(message, peer, TIMES, async_op=True)
        return sent

    def close(self) -> None:
        """Closes the communicator of the exchange."""
        self.group.comm.close()


@dataclass(frozen=True, slots=True)
class Pending:
    """An exchange that has started.

    Attributes:
        works: Its messages.
        coming: The vector of each source.
        times: What each source knows of the times.
        known: What this replica knows of them.
    """

    works: list[Started]
    coming: dict[int, Tensor]
    times: list[Tensor]
    known: NeighborTimes

    def wait(self) -> dict[int, Tensor]:
        """The vectors of this step's sources, by rank; valid until the next exchange."""
        for work in self.works:
            work.wait()
        for message in self.times:
            self.known.merge(message)
        return self.coming


__all__ = ["TIMES", "Neighbors", "Pending", "Weights"]
