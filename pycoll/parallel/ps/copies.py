"""The copies of a server's shards: who holds them, what they are sent, and new ones after a death.

A server asks the holder of a copy while it holds the shard's lock. That one asks no server in
turn, so servers never wait for each other in a circle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from pycoll.errors import Error, PeerDiedError
from pycoll.parallel.ps.held_tables import HeldTable, HeldTables
from pycoll.parallel.ps.keys import Part
from pycoll.parallel.ps.messages import Kind, Link, Message, raise_failure
from pycoll.parallel.ps.shard import Shard

_DEATH_S = 5.0  # in which a server hears of the death that a worker has seen


class Copies:
    """Links to the other servers, and what is known of their deaths.

    Args:
        server: Number of this server.
        tables: Its tables.
        on_death: Called with the number of a server whose link has broken, in a thread of its own:
            the thread that notices it holds the lock of a shard.
    """

    def __init__(self, server: int, tables: HeldTables, on_death: Callable[[int], None]) -> None:
        self._server, self._tables, self._on_death = server, tables, on_death
        self._links: dict[int, tuple[Link, threading.Lock]] = {}
        self._dead = 0  # bits
        self._changed = threading.Condition()

    def connect(self, links: Mapping[int, Link]) -> None:
        """Hears of the links to other servers."""
        self._links.update((server, (link, threading.Lock())) for server, link in links.items())

    def disconnect(self) -> None:
        """Ends the links to other servers."""
        for link, _ in self._links.values():
            link.close()

    def forget(self, server: int) -> bool:
        """Another server has died; whether that is news."""
        with self._changed:
            if self._dead >> server & 1:
                return False
            self._dead |= 1 << server
            self._changed.notify_all()
            return True

    def check_deaths(self, message: Message) -> None:
        """Waits until this server knows of the dead servers that a worker has seen.

        Raises:
            PeerDiedError: One of them lives.
        """
        with self._changed:
            if self._changed.wait_for(lambda: not message.dead & ~self._dead, _DEATH_S):
                return
            alive = (message.dead & ~self._dead).bit_length() - 1
        raise PeerDiedError(
            f"parameter server: server {alive} answers server {self._server}, but not worker "
            f"{message.worker}: that worker cannot go on",
            alive,
        )

    def decides(self, part: Part) -> bool:
        """Whether this server is the first living holder of a part."""
        return next(iter(part.holders(self._dead)), None) == self._server

    def tell(self, held: HeldTable, part: int, message: Message) -> None:
        """Sends a change of a shard to all its other holders; the caller holds its lock."""
        shard = held.shards[part]
        self._restore(held, part, shard)
        for server in sorted(shard.holders - {self._server}):
            answer = self._ask(server, message)
            if answer is not None:
                raise_failure(answer)

    def restore_all(self) -> None:
        """Makes the copies that a death has left missing, on the next servers of each part."""
        for held in self._tables.all():
            for part, shard in list(held.shards.items()):
                if self.decides(shard.part):
                    # A server that has no such table yet refuses: the next push tries again.
                    with shard.lock, suppress(Error):
                        self._restore(held, part, shard)

    def _restore(self, held: HeldTable, part: int, shard: Shard) -> None:
        """Sends the whole shard to the living holders that do not have it."""
        for server in shard.part.holders(self._dead):
            if server == self._server or server in shard.holders or not shard.is_ready:
                continue
            what = Message(Kind.RESTORE, held.table.number, part)
            shard.holders.add(server)
            what.body = shard.state()
            answer = self._ask(server, what)
            if answer is None or answer.kind == Kind.FAILED:
                shard.holders.discard(server)
            if answer is not None:
                raise_failure(answer)

    def _ask(self, server: int, message: Message) -> Message | None:
        """The answer of another server; None: it has died."""
        if self._dead >> server & 1:
            return None
        link, lock = self._links[server]
        with lock:
            try:
                link.send(message)
                return link.receive()
            except PeerDiedError:
                threading.Thread(target=self._on_death, args=(server,), daemon=True).start()
                return None


__all__ = ["Copies"]
