"""The tables of a server: which rows a message means, and what it says of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycoll.errors import Error, UsageError
from pycoll.parallel.ps.filters import CODECS, KEY_LISTS
from pycoll.parallel.ps.keys import HashRing, Layout, Table
from pycoll.parallel.ps.messages import ALL_ROWS, CACHED, Message
from pycoll.parallel.ps.optimizers import MakeOptimizer, optimizer_for
from pycoll.parallel.ps.shard import Shard, first_values


@dataclass(frozen=True, slots=True)
class HeldTable:
    """A table, its layout, and the shards of which this server has a copy, by part."""

    table: Table
    layout: Layout
    shards: dict[int, Shard]

    def shard(self, part: int) -> Shard:
        """The shard of a part.

        Raises:
            PeerDiedError: Its holders died before this server had a copy.
        """
        if part not in self.shards:
            raise self.layout.parts[part].lost()
        return self.shards[part]


@dataclass(frozen=True, slots=True)
class RowsOfShard:
    """Rows of a message that are in one shard.

    Attributes:
        part: Number of the part.
        shard: Where they are.
        places: Their places in the shard; None: all of its rows.
        where: Their places in the message.
    """

    part: int
    shard: Shard
    places: Tensor | None
    where: Tensor | slice


class HeldTables:
    """The tables of one server, by number."""

    def __init__(
        self,
        server: int,
        ring: HashRing,
        optimizer: MakeOptimizer | Mapping[str, MakeOptimizer],
        seed: int,
    ) -> None:
        self._server, self._ring, self._optimizer, self._seed = server, ring, optimizer, seed
        self._tables: dict[int, HeldTable] = {}
        self._registering = threading.Lock()
        self._key_lists: dict[tuple[int, int], OrderedDict[int, Tensor]] = {}

    def register(self, table: Table, worker: int) -> None:
        """Makes the shards of a table.

        Raises:
            UsageError: Another worker has registered another table in its place.
        """
        with self._registering:
            if table.number not in self._tables:
                self._tables[table.number] = self._make(table)
            known = self._tables[table.number].table
        if known != table:
            raise UsageError(
                f"parameter server: worker {worker} registers {table}, and another worker has "
                f"registered {known} in its place: register the same tables in the same order on "
                "all workers"
            )

    def _make(self, table: Table) -> HeldTable:
        layout = Layout(table, self._ring)
        make = optimizer_for(self._optimizer, table.name)
        shards = {i: Shard(table, layout.parts[i], make) for i in layout.held_by(self._server)}
        if table.std:
            for shard in shards.values():
                shard.set(first_values(table, shard.part, self._seed))
        return HeldTable(table, layout, shards)

    def restore(self, message: Message) -> None:
        """Makes this server a holder of a shard that another server sends.

        Raises:
            UsageError: The table is not registered.
        """
        held = self.of(message)
        make = optimizer_for(self._optimizer, held.table.name)
        shard = Shard(held.table, held.layout.parts[message.part], make)
        shard.install(message.body)
        held.shards[message.part] = shard

    def of(self, message: Message) -> HeldTable:
        """The table of a message.

        Raises:
            UsageError: It is not registered.
        """
        if message.table not in self._tables:
            raise UsageError(
                f"parameter server: table {message.table} is not registered at server "
                f"{self._server}: call register() or table() before"
            )
        return self._tables[message.table]

    def all(self) -> Iterator[HeldTable]:
        """All tables."""
        return iter(list(self._tables.values()))

    def rows(self, message: Message) -> list[RowsOfShard] | None:
        """The rows of a message, shard by shard; None: its digest of keys is not known.

        Raises:
            UsageError: A row does not exist, or is another server's.
        """
        held = self.of(message)
        if message.count == ALL_ROWS:
            found, start = [], 0
            for i in held.layout.decided_by(self._server, message.dead):
                shard = held.shard(i)
                found.append(RowsOfShard(i, shard, None, slice(start, start + len(shard.values))))
                start += len(shard.values)
            return found
        keys = self._keys(message)
        if keys is None:
            return None
        rows = keys.numpy()
        bad = rows[(rows < 0) | (rows >= held.table.rows)]
        if len(bad):
            raise held.table.no_key(int(bad[0]))
        parts, places = held.layout.part_of[rows], held.layout.place_of[rows]
        found = []
        for i in np.unique(parts).tolist():
            owner = held.layout.parts[i].server(message.dead)
            if owner != self._server:
                raise UsageError(
                    f"parameter server: server {self._server} was asked for keys of table "
                    f"{held.table.name!r} that are server {owner}'s: run the same version of "
                    "pycoll on all ranks"
                )
            here = np.flatnonzero(parts == i)
            mine = torch.from_numpy(places[here])
            found.append(RowsOfShard(i, held.shard(i), mine, torch.from_numpy(here)))
        return found

    def _keys(self, message: Message) -> Tensor | None:
        lists = self._key_lists.setdefault((message.worker, message.table), OrderedDict())
        if message.count == CACHED:
            if message.digest in lists:
                lists.move_to_end(message.digest)
            return lists.get(message.digest)
        if not 0 <= 8 * message.count <= message.body.numel():
            raise Error(f"parameter server: {message.count} keys in {message.body.numel()} bytes")
        keys = message.body[: 8 * message.count].view(torch.int64)
        if message.digest:
            lists[message.digest] = keys.clone()
            while len(lists) > KEY_LISTS:
                lists.popitem(last=False)
        return keys

    def values(self, message: Message, num_rows: int) -> Tensor:
        """The values behind the keys of a message, [num_rows, dim].

        Raises:
            Error: There are others.
        """
        table = self.of(message).table
        if message.codec not in range(len(CODECS)):
            raise Error(f"parameter server: there is no codec {message.codec}")
        codec, size = CODECS[message.codec], num_rows * table.dim
        body = message.body[8 * max(message.count, 0) :]
        expected = codec.nbytes(size, table.dtype)
        if body.numel() != expected:
            raise Error(
                f"parameter server: worker {message.worker} sent {body.numel()} bytes for "
                f"{num_rows} rows of {table}, expected {expected}"
            )
        return codec.decode(body, size, table.dtype).view(num_rows, table.dim)


__all__ = ["HeldTable", "HeldTables", "RowsOfShard"]
