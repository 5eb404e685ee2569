"""Counts what the trainers send: calls, bytes and waiting time per collective and axis.

Every collective of pycoll.parallel goes through an AxisGroup, which counts it. The core's own
ledger (`Communicator.ledger`) counts what the chosen algorithms sent for these calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pycoll.communicator import Communicator
from pycoll.work import Work

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Entry:
    """Sums over the calls of one collective on one axis.

    Attributes:
        nbytes: Sum of the payloads in bytes: the gathered array of an all_gather, the input of a
            reduce_scatter, the array of any other collective.
        waited_s: Seconds in which the caller waited for these calls without computing.
    """

    calls: int = 0
    nbytes: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Entries by axis and collective; also the start and end of each call if `spans` is a list.

    Attributes:
        entries: By (axis, collective), such as ("tp", "all_reduce").
        spans: Tuples (name, track, start_ns, end_ns) on CLOCK_MONOTONIC; None: not recorded.
    """

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    spans: list[tuple[str, str, int, int]] | None = None

    def of(self, axis: str, collective: str) -> Entry:
        """Returns an entry, created at first use."""
        return self.entries.setdefault((axis, collective), Entry())

    def clear(self) -> None:
        """Removes all entries and spans."""
        self.entries.clear()
        if self.spans is not None:
            self.spans.clear()

    @property
    def waited_s(self) -> float:
        """Sum of the waiting times of all entries."""
        return sum(entry.waited_s for entry in self.entries.values())

    def waited(self, axis: str, collective: str, start_ns: int) -> None:
        """Adds the time since `start_ns` to the waiting time."""
        end_ns = time.monotonic_ns()
        self.of(axis, collective).waited_s += (end_ns - start_ns) / 1e9
        self.span(f"{collective} {axis}", "communication", start_ns, end_ns)

    def span(self, name: str, track: str, start_ns: int, end_ns: int) -> None:
        """Records the start and end of an activity, if spans are recorded."""
        if self.spans is not None:
            self.spans.append((name, track, start_ns, end_ns))


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks along an axis through this rank; counts what they exchange.

    Attributes:
        axis: Name of the axis, such as "tp", or "dp+tp" for both.
        comm: The communicator.
        ledger: The ledger that counts the calls.
    """

    axis: str
    comm: Communicator
    ledger: Ledger

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Reduces `x` in place; it has any shape and is contiguous."""
        return self._call("all_reduce", x, x, op=op)

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

    def pass_on(self, tensors: list[Tensor]) -> Passing:
        """Starts sending tensors to the next rank and receiving such from the previous rank."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        coming = [x.new_empty(x.shape) for x in tensors]
        works = [Started(self.comm.recv(x, before, async_op=True), self, "recv") for x in coming]
        works += [self.start("send", x, x, after) for x in tensors]
        return Passing(self, tensors, coming, works, time.monotonic_ns())

    def _call(self, collective: str, message: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.count(collective, message)
        start_ns = time.monotonic_ns()
        result: Tensor = getattr(self.comm, collective)(*args, **kwargs)
        self.ledger.waited(self.axis, collective, start_ns)
        return result

    def count(self, collective: str, message: Tensor) -> None:
        """Counts one call of a collective, or one message."""
        entry = self.ledger.of(self.axis, collective)
        entry.calls += 1
        entry.nbytes += message.numel() * message.element_size()


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that runs while the caller computes."""

    work: Work
    group: AxisGroup
    collective: str

    def wait(self) -> None:
        """Waits for the collective and records the waiting time."""
        start_ns = time.monotonic_ns()
        self.work.wait()
        self.group.ledger.waited(self.group.axis, self.collective, start_ns)


@dataclass(frozen=True, slots=True)
class Passing:
    """A transfer of tensors to the next rank of a ring."""

    group: AxisGroup
    sent: list[Tensor]  # kept until they are received
    coming: list[Tensor]
    works: list[Started]
    start_ns: int

    def wait(self) -> list[Tensor]:
        """Waits for the previous rank's tensors, and until the next rank has received ours."""
        for work in self.works:
            work.wait()
        name = f"ring {sum(x.nbytes for x in self.sent)} B"
        self.group.ledger.span(name, f"axis {self.group.axis}", self.start_ns, time.monotonic_ns())
        return self.coming


__all__ = ["Entry", "Ledger", "AxisGroup", "Passing", "Started"]
