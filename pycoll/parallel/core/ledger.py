"""Counts what the trainers send: calls, bytes and waiting time per collective and axis.

Every collective of pycoll.parallel goes through an AxisGroup, which counts it. The core's own
ledger (`Communicator.ledger`) counts what the chosen algorithms sent for these calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pycoll.communicator import Communicator
from pycoll.parallel.core.devices import CPU, Clock, HostClock
from pycoll.parallel.core.transfers import Link, Receive, Transfers, ring_links
from pycoll.work import Work

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True)
class Entry:
    """Sums over the calls of one collective on one axis.

    Attributes:
        nbytes: Sum of the payloads in bytes: the gathered array of an all_gather, the input of a
            reduce_scatter, the array of any other collective.
        waited_s: Seconds in which the caller, or the current stream of its device, waited for these
            calls without computing.
    """

    calls: int = 0
    nbytes: int = 0
    waited_s: float = 0.0


Span = tuple[str, str, Any, Any]  # name, track, start and end
_MOST_OPEN = 4096  # spans whose ends are not asked for yet


@dataclass(slots=True)
class Ledger:
    """Entries by axis and collective; also the start and end of each call if `spans` is a list.

    Attributes:
        entries: By (axis, collective), such as ("tp", "all_reduce").
        spans: Tuples (name, track, start_ns, end_ns) on CLOCK_MONOTONIC; None: not recorded.
        clock: Marks the starts and ends of calls; on a device, by events on its streams.
    """

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    spans: list[tuple[str, str, int, int]] | None = None
    clock: Clock = field(default_factory=HostClock)
    _open: list[tuple[Entry | None, Span]] = field(default_factory=list)

    def of(self, axis: str, collective: str) -> Entry:
        """Returns an entry, created at first use."""
        return self.entries.setdefault((axis, collective), Entry())

    def clear(self) -> None:
        """Removes all entries and spans."""
        self.settle()
        self.entries.clear()
        if self.spans is not None:
            self.spans.clear()

    @property
    def waited_s(self) -> float:
        """Sum of the waiting times of all entries; waits until the last call is over."""
        self.settle()
        return sum(entry.waited_s for entry in self.entries.values())

    def hops(self, size: int) -> Iterable[int]:
        """The steps of a ring: 0 to size - 1. Steps 2 to size - 2 are equal but for their data."""
        return range(size)

    def waited(self, axis: str, collective: str, start: Any) -> None:
        """Adds the time since the mark `start` to the waiting time."""
        span = (f"{collective} {axis}", "communication", start, self.clock.now())
        self._add(self.of(axis, collective), span)

    def span(self, name: str, track: str, start: Any, end: Any) -> None:
        """Records the start and end of an activity, if spans are recorded."""
        if self.spans is not None:
            self._add(None, (name, track, start, end))

    def _add(self, entry: Entry | None, span: Span) -> None:
        self._open.append((entry, span))
        if isinstance(self.clock, HostClock) or len(self._open) > _MOST_OPEN:
            self.settle()

    def settle(self) -> None:
        """Reads the times of all marks; waits until the last one is reached."""
        while self._open:
            entry, (name, track, start, end) = self._open.pop(0)
            start_ns, end_ns = self.clock.ns(start), self.clock.ns(end)
            if entry is not None:
                entry.waited_s += (end_ns - start_ns) / 1e9
            if self.spans is not None:
                self.spans.append((name, track, start_ns, end_ns))


@dataclass(slots=True, eq=False)
class AxisGroup:
    """The ranks along an axis through this rank; counts what they exchange.

    Attributes:
        axis: Name of the axis, such as "tp", or "dp+tp" for both.
        comm: The communicator.
        ledger: The ledger that counts the calls.
        transfers: Moves tensors from one rank to another.
        device: The device of this rank's tensors.
    """

    axis: str
    comm: Communicator
    ledger: Ledger
    transfers: Transfers
    device: str = CPU

    @classmethod
    def over(
        cls, comm: Communicator, axis: str, ledger: Ledger | None = None, device: str = CPU
    ) -> AxisGroup:
        """A group of other ranks than those of an axis, with transfers of its own."""
        return cls(axis, comm, ledger or Ledger(), Transfers(comm), device)

    def go_on_with(self, comm: Communicator) -> None:
        """Takes another communicator, such as one of the ranks that are left."""
        self.comm, self.transfers = comm, Transfers(comm)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def array(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros that stay, where the other ranks access them without a copy.

        Collective on a device: all ranks make the same arrays, in the same order.
        """
        device = None if self.device == CPU else self.device
        made: Tensor = self.comm.empty(count, dtype, device)
        return made

    def own_part(self, part: Tensor) -> Tensor:
        """A part of a kept array that is this rank's alone, for a collective in place.

        On a device a copy: ranks access each other's kept arrays there, and all of them have to
        pass the same part of one.
        """
        return part if self.device == CPU else part.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Reduces `x` in place; it has any shape and is contiguous."""
        return self._call("all_reduce", x, x, op=op)

    def reduce(self, x: Tensor, root: int) -> Tensor:
        """Reduces `x` in place on the rank `root`; on the others `x` is unspecified afterwards."""
        return self._call("reduce", x, x, root, out=x)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """Overwrites `x`, which is contiguous, with that of the rank `root`."""
        return self._call("broadcast", x, x, root)

    def all_gather(self, x: Tensor, counts: list[int]) -> Tensor:
        """Gathers flat arrays into one; rank r contributes `counts[r]` elements."""
        out = x.new_empty(sum(counts))
        return self._call("all_gather", out, x.reshape(-1), out=out, counts=counts)

    def reduce_scatter(self, x: Tensor, counts: list[int]) -> Tensor:
        """Returns this rank's part of the sum; rank r gets `counts[r]` elements."""
        out = x.new_empty(counts[self.rank])
        return self._call("reduce_scatter", x, x.reshape(-1), out=out, counts=counts)

    def all_to_all(self, x: Tensor, there: list[int], here: list[int]) -> Tensor:
        """Sends `there[r]` consecutive rows of `x` to rank r and receives `here[r]` rows."""
        row, flat = x.shape[1:].numel(), x.contiguous().view(-1)
        out = x.new_empty((sum(here), *x.shape[1:]))
        counts = {"send_counts": [n * row for n in there], "recv_counts": [n * row for n in here]}
        self._call("all_to_all", flat, flat, out.view(-1), **counts)
        return out

    def start(self, collective: str, message: Tensor, *args: Any, **kwargs: Any) -> Started:
        """Starts an asynchronous collective; `message` is the payload that is counted."""
        self.count(collective, message)
        work = getattr(self.comm, collective)(*args, async_op=True, **kwargs)
        return Started(work, self, collective)

    def exchange(
        self, links: list[Link], going: dict[Link, Tensor], coming: dict[Link, Tensor]
    ) -> list[Started]:
        """Starts to send and to receive tensors along links.

        Args:
            links: All links of the group, identical on all ranks.
            going: Contiguous tensors by the link that each leaves along.
            coming: Memory for tensors by the link that each comes along.
        """
        self.transfers.connect(links, self.device)
        works = [Started(self.transfers.receive(*of), self, "recv") for of in coming.items()]
        for link, x in going.items():
            self.count("send", x)
            works.append(Started(self.transfers.send(link, x), self, "send"))
        return works

    def pass_on(self, tensors: list[Tensor]) -> Passing:
        """Starts sending tensors to the next rank and receiving such from the previous rank."""
        links, start = ring_links(self.size), self.ledger.clock.now()
        coming = [x.new_empty(x.shape) for x in tensors]
        works: list[Started] = []
        for x, into in zip(tensors, coming, strict=True):
            works += self.exchange(links, {links[self.rank]: x}, {links[self.rank - 1]: into})
        return Passing(self, tensors, coming, works, start)

    def _call(self, collective: str, message: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.count(collective, message)
        start = self.ledger.clock.now()
        result: Tensor = getattr(self.comm, collective)(*args, **kwargs)
        self.ledger.waited(self.axis, collective, start)
        return result

    def count(self, collective: str, message: Tensor) -> None:
        """Counts one call of a collective, or one message."""
        entry = self.ledger.of(self.axis, collective)
        entry.calls += 1
        entry.nbytes += message.numel() * message.element_size()


@dataclass(frozen=True, slots=True)
class Started:
    """A collective, or a message, that runs while the caller computes."""

    work: Work | Receive
    group: AxisGroup
    collective: str

    def wait(self) -> None:
        """Waits for the collective and records the waiting time."""
        ledger = self.group.ledger
        start = ledger.clock.now()
        self.work.wait()
        ledger.waited(self.group.axis, self.collective, start)


@dataclass(frozen=True, slots=True)
class Passing:
    """A transfer of tensors to the next rank of a ring."""

    group: AxisGroup
    sent: list[Tensor]  # kept until they are received
    coming: list[Tensor]
    works: list[Started]
    start: Any  # a mark of the clock

    def wait(self) -> list[Tensor]:
        """Waits for the previous rank's tensors, and until the next rank has received ours."""
        for work in self.works:
            work.wait()
        ledger, name = self.group.ledger, f"ring {sum(x.nbytes for x in self.sent)} B"
        ledger.span(name, f"axis {self.group.axis}", self.start, ledger.clock.now())
        return self.coming


__all__ = ["Entry", "Ledger", "AxisGroup", "Passing", "Started"]
