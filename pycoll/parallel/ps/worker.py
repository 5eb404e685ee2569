"""A worker: pulls weights, pushes gradients, and counts its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import PeerDiedError, UsageError
from pycoll.parallel.core.batches import Batch, num_samples
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.core.placement import share
from pycoll.parallel.ps.asking import Servers
from pycoll.parallel.ps.consistency import Consistency
from pycoll.parallel.ps.filters import CODECS, Filter
from pycoll.parallel.ps.keys import HashRing
from pycoll.parallel.ps.messages import Kind, Link, Message, json_of
from pycoll.parallel.ps.registration import Registration
from pycoll.parallel.ps.report import Report, report_of
from pycoll.parallel.ps.row_exchange import RowExchange
from pycoll.parallel.ps.tables import DenseTable, SparseTable


class Worker(Registration):
    """Trains with weights that servers hold.

    Made by `pc.ps.run`. A step is: `pull`, backward passes, `push`, `clock`.

    Attributes:
        num_workers: Workers at the start.
        ledger: Counts its messages and their bytes by kind.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        ring: HashRing,
        consistency: Consistency,
        number: int = 0,
        num_workers: int = 1,
        *,
        filters: Sequence[Filter] = (),
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(Servers(links), ring, number)
        self.num_workers, self._consistency = num_workers, consistency
        self.ledger = ledger or Ledger()
        self._filters = list(filters)
        self._exchange = RowExchange(self._servers, any(one.caches_keys for one in filters))
        self._codec = max((one.codec for one in filters), default=0)
        self._pushed_at = -1
        self.pulling_s = self.pushing_s = 0.0
        self._is_open = True

    @property
    def gathers(self) -> bool:
        """Whether an update is the mean of several workers' gradients."""
        return self._consistency.gathers

    def pull(self) -> None:
        """Sets the registered models to the servers' weights.

        Waits as the mode says: "sync" and "ksync" for the update of the step before, "ssp" until
        no worker is too far behind.

        Raises:
            TimeoutError: A worker that this one waits for made no step before the deadline.
            PeerDiedError: Servers have died, and their keys have no other copy.

        Cost: a header to each server, and all weights.
        """
        start_s = time.monotonic()
        for table in self._tables:
            if isinstance(table, DenseTable):
                everything = torch.arange(table.table.rows)
                table.pulled[...] = self._pull(table, everything)
                table.write()
        self.pulling_s += time.monotonic() - start_s

    def pull_rows(self, table: SparseTable, rows: Tensor) -> Tensor:
        """Rows of a sparse table.

        Args:
            table: The table.
            rows: Ascending, without repetitions, [n] int64.

        Returns:
            [n, dim], on the CPU.

        Raises:
            UsageError: No server has one of the keys.
            Others: As `pull`.

        Cost: 8 bytes for each key, or for each list with the filter KeyCache, and the values.
        """
        start_s = time.monotonic()
        rows = rows.to("cpu", torch.int64).contiguous()
        bad = rows[(rows < 0) | (rows >= table.table.rows)]
        if len(bad):
            raise table.table.no_key(int(bad[0]))
        values = self._pull(table, rows)
        self.pulling_s += time.monotonic() - start_s
        return values

    def push(self, weight: float = 1.0) -> int:
        """Sends the gradients of the models and of the rows that were looked up, and clears them.

        Args:
            weight: Weight of these gradients in the mean of a step; for example the samples.

        Returns:
            Number of shards that dropped them: too late, or too stale.

        Raises:
            UsageError: A second push at one clock, in a mode that gathers.
            Others: As `pull`.

        Cost: a header to each server; the gradients of the models; 8 bytes for the key of each
            touched row, and its gradient.
        """
        if self._consistency.gathers and self._pushed_at == self.steps:
            raise UsageError(
                f"push: worker {self.number} has pushed at clock {self.steps} already, and a step "
                "has one gradient of each worker: call clock() after push()"
            )
        start_s = time.monotonic()
        self._num_pushes += 1
        self._pushed_at = self.steps
        dropped = 0
        for table in self._tables:
            if isinstance(table, DenseTable):
                rows, gradients = table.take_gradient()
                dropped += self._push(table, rows, gradients, weight)
            else:
                rows, gradients = table.gradient()
                dropped += self._push(table, rows, gradients.to(table.table.dtype), weight)
                table.leaves.clear()
        self.pushing_s += time.monotonic() - start_s
        return dropped

    def clock(self) -> None:
        """Ends a step of this worker. Servers hear of it at once, if the mode needs it."""
        self.steps += 1
        if self._consistency.needs_clocks:
            self._servers.all(lambda: Message(Kind.CLOCK, worker=self.number, clock=self.steps))

    def is_late(self) -> bool:
        """Whether the step that this worker computes has ended without it.

        In the mode "ksync", or with backup workers, a gradient would be dropped then: `skip`.
        """
        table = self._tables[0].table
        answers = self._servers.all(
            lambda: Message(Kind.STEP, table.number, worker=self.number, clock=self.steps)
        )
        return max(answer.clock for answer in answers.values()) > self.steps

    def skip(self) -> None:
        """Drops the gradients of this step; the next `pull` goes to the step that is current."""
        for table in self._tables:
            if isinstance(table, DenseTable):
                table.take_gradient()
            else:
                table.leaves.clear()

    def shard(self, loader: Iterable[Any]) -> Iterator[Batch]:
        """This worker's share of each batch of a loader that is identical on all workers."""
        for x, y in loader:
            start, stop = share(num_samples(x), self.num_workers, self.number)
            yield Batch(x[start:stop], y[start:stop])

    def report(self) -> Report:
        """What the servers and this worker have counted."""
        answers = self._servers.all(lambda: Message(Kind.REPORT, worker=self.number))
        found = [json_of(answer, f"server {server}") for server, answer in answers.items()]
        return report_of(found, self.number, self.ledger, self.pulling_s, self.pushing_s)

    def close(self) -> None:
        """Leaves: no other worker waits for this one any more."""
        if self._is_open:
            self._is_open = False
            with suppress(PeerDiedError):  # then none is left that could wait for this worker
                self._servers.all(lambda: Message(Kind.LEAVE, worker=self.number))
            self._servers.close()

    def _pull(self, of: DenseTable | SparseTable, rows: Tensor) -> Tensor:
        values = torch.empty(len(rows), of.table.dim, dtype=of.table.dtype)
        make = self._question(Kind.PULL, of.table)
        for places, answer in self._exchange.ask(of.table, of.layout, rows, make):
            values[places] = answer.body.view(values.dtype).view(len(places), of.table.dim)
            if self._consistency.gathers:  # a worker that was late goes on with the current step
                self.steps = max(self.steps, answer.clock)
        return values

    def _push(
        self, of: DenseTable | SparseTable, rows: Tensor, gradients: Tensor, weight: float
    ) -> int:
        table = of.table

        def pulled(some: Tensor) -> Tensor:
            return of.pulled[some] if isinstance(of, DenseTable) else of.values(some)

        for one in self._filters:
            rows, gradients = one.select(table, rows, gradients, pulled)
        written = torch.empty_like(gradients) if self._codec else gradients
        codec = CODECS[self._codec]

        def make() -> Message:
            question = self._question(Kind.PUSH, table)()
            question.codec, question.weight, question.rate = self._codec, weight, of.rate
            return question

        def body(places: Tensor) -> Tensor:
            values = gradients[places].reshape(-1)
            encoded = codec.encode(values)
            if self._codec:
                decoded = codec.decode(encoded, values.numel(), values.dtype)
                written[places] = decoded.view(len(places), -1)
            return encoded

        answers = self._exchange.ask(
            table, of.layout, rows, make, body, asks_all=self._consistency.gathers
        )
        for one in self._filters:
            one.sent(table, rows, gradients, written)
        return sum(answer.number for _, answer in answers)


__all__ = ["Worker"]
