"""What the trainers send: calls, bytes and waiting time of each collective on each axis.

Every collective of pycoll.parallel goes through a AxisGroup, which counts it. The core's own ledger
(`Communicator.ledger`) says what the chosen algorithms made of them.
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
        calls: Number of calls.
        nbytes: Sum of their messages, bytes: of an all_gather the gathered, of a reduce_scatter the
            scattered one, of all others the array.
        waited_s: Seconds in which the caller computed nothing because of them.
    """

    calls: int = 0
    nbytes: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Entries by axis and collective, and, while `spans` is a list, when each call began and ended.

    Attributes:
        entries: By (axis, collective), such as ("tp", "all_reduce").
        spans: Of (name, track, start_ns, end_ns) on CLOCK_MONOTONIC; None: not kept.
    """

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    spans: list[tuple[str, str, int, int]] | None = None

    def of(self, axis: str, collective: str) -> Entry:
        """The entry, made when it is first asked for."""
        return self.entries.setdefault((axis, collective), Entry())

    def clear(self) -> None:
        """Forgets all entries and spans."""
        self.entries.clear()
        if self.spans is not None:
            self.spans.clear()

    @property
    def waited_s(self) -> float:
        """Of all entries."""
        return sum(entry.waited_s for entry in self.entries.values())

    def waited(self, axis: str, collective: str, start_ns: int) -> None:
        """Books the time since `start_ns` as waited."""
        end_ns = time.monotonic_ns()
        self.of(axis, collective).waited_s += (end_ns - start_ns) / 1e9
        self.span(f"{collective} {axis}", "communication", start_ns, end_ns)

    def span(self, name: str, track: str, start_ns: int, end_ns: int) -> None:
        """Keeps when something began and ended, while spans are kept."""
        if self.spans is not None:
            self.spans.append((name, track, start_ns, end_ns))


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks of this rank's line along an axis; counts what they exchange.

    Attributes:
        axis: Its name, such as "tp", or "dp+tp" for both.
        comm: The communicator.
        ledger: Where calls are counted.
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
        """In place; `x` of any shape, contiguous."""
        return self._call("all_reduce", x, x, op=op)

    def all_gather(self, x: Tensor, counts: list[int]) -> Tensor:
        """Flat arrays of `counts` elements, one of each rank, into one."""
        out = x.new_empty(sum(counts))
        return self._call("all_gather", out, x.reshape(-1), out=out, counts=counts)

    def reduce_scatter(self, x: Tensor, counts: list[int]) -> Tensor:
        """The sum of flat arrays, of which rank r gets `counts[r]` elements."""
        out = x.new_empty(counts[self.rank])
        return self._call("reduce_scatter", x, x.reshape(-1), out=out, counts=counts)

    def all_to_all(self, x: Tensor, there: list[int], here: list[int]) -> Tensor:
        """Consecutive rows of `x`, `there[r]` to rank r, for `here[r]` that come from it."""
        row, flat = x.shape[1:].numel(), x.contiguous().view(-1)
        out = x.new_empty((sum(here), *x.shape[1:]))
        counts = {"send_counts": [n * row for n in there], "recv_counts": [n * row for n in here]}
        self._call("all_to_all", flat, flat, out.view(-1), **counts)
        return out

    def start(self, collective: str, message: Tensor, *args: Any, **kwargs: Any) -> Started:
        """Starts a collective of the communicator beside the caller; `message` is what it moves."""
        self.count(collective, message)
        work = getattr(self.comm, collective)(*args, async_op=True, **kwargs)
        return Started(work, self, collective)

    def pass_on(self, tensors: list[Tensor]) -> Passing:
        """Starts to send tensors to the next rank, and to receive such from the one before."""
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
        """Books one call of a collective, or one message."""
        entry = self.ledger.of(self.axis, collective)
        entry.calls += 1
        entry.nbytes += message.numel() * message.element_size()


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that runs beside the caller."""

    work: Work
    line: AxisGroup
    collective: str

    def wait(self) -> None:
        """Waits for its end, and books the time."""
        start_ns = time.monotonic_ns()
        self.work.wait()
        self.line.ledger.waited(self.line.axis, self.collective, start_ns)


@dataclass(frozen=True, slots=True)
class Passing:
    """Tensors on their way around a ring."""

    line: AxisGroup
    sent: list[Tensor]  # they live until they are taken
    coming: list[Tensor]
    works: list[Started]
    start_ns: int

    def wait(self) -> list[Tensor]:
        """Waits for what the rank before has sent, and until the next one has taken the rest."""
        for work in self.works:
            work.wait()
        name = f"ring {sum(x.nbytes for x in self.sent)} B"
        self.line.ledger.span(name, f"axis {self.line.axis}", self.start_ns, time.monotonic_ns())
        return self.coming


__all__ = ["Entry", "Ledger", "AxisGroup", "Passing", "Started"]
