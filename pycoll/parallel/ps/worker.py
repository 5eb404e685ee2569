"""A worker: pulls weights, pushes gradients, and counts its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core import structures
from pycoll.parallel.core.batches import Batch, num_samples
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.core.placement import share
from pycoll.parallel.ps.asking import Servers
from pycoll.parallel.ps.consistency import Consistency
from pycoll.parallel.ps.filters import CODECS, Filter
from pycoll.parallel.ps.keys import HashRing, Layout, Table
from pycoll.parallel.ps.messages import Kind, Link, Message, json_body, json_of
from pycoll.parallel.ps.report import Report, report_of
from pycoll.parallel.ps.row_exchange import RowExchange
from pycoll.parallel.ps.tables import DenseTable, Embedding, SparseTable


class Worker:
    """Trains with weights that servers hold.

    Made by `pc.ps.run`. A step is: `pull`, backward passes, `push`, `clock`.

    Attributes:
        number: Number of this worker.
        num_workers: Workers at the start.
        steps: Its clock: the number of steps that it has ended.
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
        self.number, self.num_workers, self.steps = number, num_workers, 0
        self.ledger = ledger or Ledger()
        self._servers, self._ring, self._consistency = Servers(links), ring, consistency
        self._filters = list(filters)
        self._exchange = RowExchange(self._servers, any(one.caches_keys for one in filters))
        self._codec = max((one.codec for one in filters), default=0)
        self._tables: list[DenseTable | SparseTable] = []
        self._num_pushes, self._pushed_at = 0, -1
        self.pulling_s = self.pushing_s = 0.0
        self._is_open = True

    @property
    def gathers(self) -> bool:
        """Whether an update is the mean of several workers' gradients."""
        return self._consistency.gathers

    def register(
        self, model: nn.Module | Iterable[Tensor], name: str = "model", *, rate: float | None = None
    ) -> DenseTable:
        """Gives a model's weights to the servers; those of worker 0 are the first ones.

        Collective over the workers: all register the same things in the same order.

        Args:
            model: A module, or its parameters. Buffers, such as running means, stay local.
            name: Name of the table.
            rate: Learning rate sent with each push, in place of the server's; it may be changed as
                the result's `rate`.

        Returns:
            The table.

        Raises:
            UsageError: No parameter learns, or another worker registered something else.

        Cost: worker 0 sends all weights to each server that holds a copy of them.
        """
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        made = DenseTable(len(self._tables), name, parameters, self._ring)
        made.rate = float("nan") if rate is None else rate
        self._announce(made.table)
        if self.number == 0:
            self._send_first(made.table, made.layout, made.weights())
        self._tables.append(made)
        return made

    def table(
        self,
        name: str,
        rows: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        std: float = 0.0,
        values: Tensor | None = None,
    ) -> SparseTable:
        """Makes a sparse table on the servers. Collective over the workers.

        Args:
            name: Its name.
            rows: Number of rows.
            dim: Elements of each.
            dtype: A floating dtype.
            std: Standard deviation of the first values, by place, whatever the servers are; 0:
                zeros.
            values: First values instead, [rows, dim]; worker 0 sends them.

        Returns:
            The table, for `embedding`, `pull_rows` and `push_rows`.

        Raises:
            UsageError: The sizes are not positive, or differ between workers.
        """
        if rows < 1 or dim < 1 or not dtype.is_floating_point:
            raise UsageError(
                f"table {name!r}: rows={rows}, dim={dim}, {dtype}: expected at least one of each, "
                "and a floating dtype"
            )
        table = Table(len(self._tables), name, rows, dim, dtype, std=std)
        made = SparseTable(table, Layout(table, self._ring))
        self._announce(table)
        if values is not None and self.number == 0:
            self._send_first(table, made.layout, values.detach().to(dtype).reshape(rows, dim))
        self._tables.append(made)
        return made

    def embedding(self, name: str, rows: int, dim: int, **options: Any) -> Embedding:
        """A layer that looks up the rows of a new `table`, with the options of `table`."""
        return Embedding(self.table(name, rows, dim, **options), self.pull_rows)

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
            [n, dim].

        Raises:
            UsageError: No server has one of the keys.
            Others: As `pull`.

        Cost: 8 bytes for each key, or for each list with the filter KeyCache, and the values.
        """
        start_s = time.monotonic()
        rows = rows.to(torch.int64).contiguous()
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
            self._servers.all(lambda: Message(Kind.LEAVE, worker=self.number))
            self._servers.close()

    def _question(self, kind: Kind, table: Table) -> Callable[[], Message]:
        return lambda: Message(
            kind, table.number, worker=self.number, clock=self.steps, number=self._num_pushes
        )

    def _announce(self, table: Table) -> None:
        fields = {name: getattr(table, name) for name in Table.__slots__}
        fields["dtype"] = structures.dtype_name(table.dtype)
        body = json_body(fields)
        self._servers.all(
            lambda: Message(Kind.REGISTER, table.number, worker=self.number, body=body)
        )

    def _send_first(self, table: Table, layout: Layout, values: Tensor) -> None:
        def make() -> dict[int, Message]:
            questions = {}
            for server in self._servers.living:
                rows = torch.from_numpy(layout.rows_of(layout.held_by(server)))
                questions[server] = self._question(Kind.INIT, table)()
                questions[server].body = values[rows].view(-1).view(torch.uint8)
            return questions

        self._servers.ask_until_all_live(make)

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
