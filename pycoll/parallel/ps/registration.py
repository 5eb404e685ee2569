"""What a worker registers at the servers: models and sparse tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core import structures
from pycoll.parallel.ps.asking import Servers
from pycoll.parallel.ps.keys import HashRing, Layout, Table
from pycoll.parallel.ps.messages import Kind, Message, json_body
from pycoll.parallel.ps.optimizer_state import State, assembled, of_parts
from pycoll.parallel.ps.snapshot import pack, unpack
from pycoll.parallel.ps.tables import DenseTable, Embedding, SparseTable


class Registration(ABC):
    """The tables of a worker.

    Attributes:
        number: Number of this worker.
        steps: Its clock: the number of steps that it has ended.
    """

    def __init__(self, servers: Servers, ring: HashRing, number: int) -> None:
        self.number, self.steps = number, 0
        self._servers, self._ring = servers, ring
        self._tables: list[DenseTable | SparseTable] = []
        self._num_pushes = 0

    @abstractmethod
    def pull_rows(self, table: SparseTable, rows: Tensor) -> Tensor:
        """Rows of a sparse table."""

    def register(
        self,
        model: nn.Module | Iterable[Tensor],
        name: str = "model",
        *,
        rate: float | None = None,
        state: Mapping[Tensor, Mapping[str, Any]] | None = None,
    ) -> DenseTable:
        """Gives a model's weights to the servers; those of worker 0 are the first ones.

        Collective over the workers: all register the same things in the same order.

        Args:
            model: A module, or its parameters. Buffers, such as running means, stay local.
            name: Name of the table.
            rate: Learning rate sent with each push, in place of the server's; it may be changed as
                the result's `rate`.
            state: The `state` of an optimizer of torch, from which the servers' optimizers
                continue; that of worker 0 counts.

        Returns:
            The table.

        Raises:
            UsageError: No parameter learns, or another worker registered something else.

        Cost: worker 0 sends all weights to each server that holds a copy of them.
        """
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        made = DenseTable(len(self._tables), name, parameters, self._ring)
        made.rate = float("nan") if rate is None else rate
        self._announce(made.table, has_values=True)
        if self.number == 0:
            if state:  # before the weights, for which gradients wait
                self._send_state(made.table, made.layout, made.as_rows(state))
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
            values: First values instead, [rows, dim], on any device. Worker 0 sends them; what
                other workers pass is not used, and the first pull of each waits for them.

        Returns:
            The table, for `Worker.pull_rows`.

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
        self._announce(table, has_values=values is not None)
        if values is not None and self.number == 0:
            first = values.detach().to("cpu", dtype).reshape(rows, dim)
            self._send_first(table, made.layout, first)
        self._tables.append(made)
        return made

    def embedding(self, name: str, rows: int, dim: int, **options: Any) -> Embedding:
        """A layer that looks up the rows of a new `table`, with the options of `table`."""
        return Embedding(self.table(name, rows, dim, **options), self.pull_rows)

    def optimizer_state(self, of: DenseTable) -> dict[Tensor, State]:
        """The state of the servers' optimizers, as the `state` of an optimizer of torch.

        Returns:
            By parameter and key, such as "exp_avg". Empty before the first step, and for optimizers
            without a state.

        Raises:
            PeerDiedError: Servers have died, and their keys have no other copy.

        Cost: a header to each server, and the state, which Adam has twice the size of the weights.
        """
        table, layout = of.table, of.layout

        def make() -> dict[int, Message]:
            servers = {part.server(self._servers.dead) for part in layout.parts}
            question = self._question(Kind.TAKE_STATE, table)
            return {server: question() for server in sorted(servers)}

        parts: dict[int, State] = {}
        for server, answer in self._servers.ask_until_all_live(make).items():
            parts |= unpack(answer.body, f"server {server}")
        return of.of_parameters(assembled(table, layout, parts))

    def _question(self, kind: Kind, table: Table) -> Callable[[], Message]:
        return lambda: Message(
            kind, table.number, worker=self.number, clock=self.steps, number=self._num_pushes
        )

    def _announce(self, table: Table, has_values: bool) -> None:
        """Registers a table; with `has_values`, worker 0 sends its first values afterwards."""
        fields = {name: getattr(table, name) for name in Table.__slots__}
        fields["dtype"] = structures.dtype_name(table.dtype)
        body = json_body({"table": fields, "has_values": has_values})
        self._servers.all(
            lambda: Message(Kind.REGISTER, table.number, worker=self.number, body=body)
        )

    def _send_first(self, table: Table, layout: Layout, values: Tensor) -> None:
        def body(server: int) -> Tensor:
            rows = torch.from_numpy(layout.rows_of(layout.held_by(server)))
            return values[rows].view(-1).view(torch.uint8)

        self._send_to_holders(Kind.INIT, table, body)

    def _send_state(self, table: Table, layout: Layout, state: State) -> None:
        def body(server: int) -> Tensor:
            return pack(of_parts(layout, layout.held_by(server), state))

        self._send_to_holders(Kind.PUT_STATE, table, body)

    def _send_to_holders(self, kind: Kind, table: Table, body: Callable[[int], Tensor]) -> None:
        """Sends each living server what `body` makes for it."""

        def make() -> dict[int, Message]:
            questions = {server: self._question(kind, table)() for server in self._servers.living}
            for server, question in questions.items():
                question.body = body(server)
            return questions

        self._servers.ask_until_all_live(make)


__all__ = ["Registration"]
