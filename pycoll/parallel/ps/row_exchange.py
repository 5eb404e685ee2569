"""Questions about rows: each server is asked for its own, with their keys or a digest of them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pycoll.parallel.ps.asking import Answers, Servers
from pycoll.parallel.ps.filters import KEY_LISTS
from pycoll.parallel.ps.keys import Layout, Table
from pycoll.parallel.ps.messages import CACHED, Kind, Message


class RowExchange:
    """Asks for rows, whatever servers have them.

    Args:
        servers: The servers.
        caches_keys: A list of keys that a server has had before is sent as a digest.
    """

    def __init__(self, servers: Servers, caches_keys: bool) -> None:
        self._servers, self._caches_keys = servers, caches_keys
        self._known: dict[tuple[int, int], OrderedDict[int, None]] = {}  # by server and table

    def ask(
        self,
        table: Table,
        layout: Layout,
        rows: Tensor,
        make: Callable[[], Message],
        values: Callable[[Tensor], Tensor] | None = None,
        *,
        asks_all: bool = False,
    ) -> list[tuple[Tensor, Message]]:
        """Asks each server for its rows, again if a server has died meanwhile.

        Args:
            table: The table.
            layout: Its layout.
            rows: Ascending, without repetitions; all rows of a dense table need no keys.
            make: Makes a question without a body.
            values: Bytes of the values at places in `rows`, to follow the keys.
            asks_all: Also ask the servers that have none of the rows.

        Returns:
            For each server the places in `rows` of its rows, and its answer.

        Raises:
            PeerDiedError: Keys have no living holder.
        """
        is_whole = not table.sparse and len(rows) == table.rows
        while True:
            places = self._places(layout, rows, is_whole, asks_all)
            questions = {}
            for server, mine in places.items():
                questions[server] = question = make()
                pieces = [] if is_whole else self._keys(question, server, rows[mine])
                if values is not None:
                    pieces.append(values(mine))
                if pieces:
                    question.body = torch.cat(pieces)
            answers = self._servers.ask(questions)
            if answers is not None and not self._forgets(answers, questions):
                return [(places[server], answer) for server, answer in answers.items()]

    def _places(
        self, layout: Layout, rows: Tensor, is_whole: bool, asks_all: bool
    ) -> dict[int, Tensor]:
        dead = self._servers.dead
        if is_whole or asks_all:
            # Dead servers are in the loop, too: it raises if keys have no living holder.
            parts = {server: layout.decided_by(server, dead) for server in self._servers.links}
            parts = {server: of for server, of in parts.items() if of}
        if is_whole:  # in the order of the server: part after part
            return {server: torch.from_numpy(layout.rows_of(of)) for server, of in parts.items()}
        servers = torch.from_numpy(layout.servers_of(rows.numpy(), dead))
        asked = sorted(parts) if asks_all else torch.unique(servers).tolist()
        return {server: torch.nonzero(servers == server).view(-1) for server in asked}

    def _keys(self, question: Message, server: int, keys: Tensor) -> list[Tensor]:
        """The keys as they are sent: nothing if the server has them."""
        written = keys.view(torch.uint8)
        question.count = len(keys)
        if not self._caches_keys or not len(keys):
            return [written]
        digest = hashlib.blake2b(written.numpy().tobytes(), digest_size=8).digest()
        question.digest = int.from_bytes(digest, "little", signed=True) or 1
        known = self._known.setdefault((server, question.table), OrderedDict())
        is_known = question.digest in known
        known[question.digest] = None
        known.move_to_end(question.digest)
        while len(known) > KEY_LISTS:
            known.popitem(last=False)
        if is_known:
            question.count = CACHED
        return [] if is_known else [written]

    def _forgets(self, answers: Answers, questions: Mapping[int, Message]) -> bool:
        """Whether a server asks for the keys again."""
        unknown = [server for server, a in answers.items() if a.kind == Kind.UNKNOWN_KEYS]
        for server in unknown:
            self._known.pop((server, questions[server].table), None)
        return bool(unknown)


__all__ = ["RowExchange"]
