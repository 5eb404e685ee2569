"""What a server decides on pushes: when a step is complete, and that copies have it before.

A server asks the holder of a copy while it holds the shard's lock. That one asks no server in
turn, so servers never wait for each other in a circle.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from pycoll.errors import PeerDiedError
from pycoll.parallel.ps.consistency import Consistency, Damping
from pycoll.parallel.ps.held_tables import HeldTable, HeldTables
from pycoll.parallel.ps.keys import Part
from pycoll.parallel.ps.members import Members
from pycoll.parallel.ps.messages import (
    ALL_ROWS,
    DROP,
    HOLD,
    Kind,
    Link,
    Message,
    raise_failure,
)
from pycoll.parallel.ps.shard import Gradient, Shard

_DEATH_S = 5.0  # in which a server hears of the death that a worker has seen


class Updates:
    """Decides on the pushes of the parts whose first living holder is this server.

    Attributes:
        staleness: How many pushes to a shard had a staleness, in updates.
        dropped: How many were dropped, as "late" or "stale".
    """

    def __init__(
        self,
        server: int,
        consistency: Consistency,
        damping: Damping,
        members: Members,
        tables: HeldTables,
    ) -> None:
        self._server, self._members, self._tables = server, members, tables
        self._consistency, self._damping = consistency, damping
        self._links: dict[int, tuple[Link, threading.Lock]] = {}
        self._dead: set[int] = set()
        self._dead_changed = threading.Condition()
        self._counting = threading.Lock()
        self.staleness: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()

    def connect(self, links: Mapping[int, Link]) -> None:
        """Hears of the links to other servers, which hold copies."""
        self._links.update((server, (link, threading.Lock())) for server, link in links.items())

    def disconnect(self) -> None:
        """Ends the links to other servers."""
        for link, _ in self._links.values():
            link.close()

    def push(self, message: Message, part: int, shard: Shard, gradient: Gradient) -> bool:
        """Makes an update, or holds it until its step is complete; False: it was dropped."""
        with shard.lock:
            if message.number <= shard.last.get(message.worker, 0):
                return True  # made before the server died to which the worker sent it first
            stale, factor = self._decide(message, shard)
            self._copy(message, part, shard, gradient, factor)
            shard.take(message, gradient, factor)
            if factor == DROP:
                self._drop("late" if self._consistency.gathers else "stale")
            elif factor == HOLD:
                self.settle(self._tables.of(message), part)
            else:
                self._count(stale)
            return factor != DROP

    def _decide(self, message: Message, shard: Shard) -> tuple[int, float]:
        """The staleness of a push, and the factor of its learning rate."""
        if self._consistency.gathers:
            return 0, DROP if message.clock < shard.version else HOLD
        stale = shard.version - shard.pulled.get(message.worker, shard.version)
        factor = self._damping.factor(stale)
        return stale, DROP if factor is None else factor

    def settle(self, held: HeldTable, part: int) -> None:
        """Makes the steps of a shard that are complete; the caller holds its lock."""
        shard, members = held.shards[part], self._members
        while self._consistency.gathers:
            behind = members.behind(shard.version)
            pushed = set(shard.held.get(shard.version, ()))
            apply = Message(Kind.APPLY, held.table.number, part, clock=shard.version + 1)
            if pushed and self._consistency.is_complete(pushed, behind):
                self._count(0, len(pushed))
            elif not pushed and not behind and members.clocks:
                apply.clock = members.slowest  # no worker takes part in the steps before
            else:
                return
            self._tell_copies(shard.part, apply)
            shard.apply_held(apply.clock)

    def settle_all(self) -> None:
        """Looks at all shards again, after the workers or the servers have changed."""
        if not self._consistency.gathers:
            return
        for held in self._tables.all():
            for part, shard in held.shards.items():
                if self._decides(shard.part):
                    with shard.lock:
                        self.settle(held, part)

    def forget(self, server: int) -> None:
        """Another server has died: this one decides where it is the next holder."""
        with self._dead_changed:
            if server in self._dead:
                return
            self._dead.add(server)
            self._dead_changed.notify_all()
        self.settle_all()

    def check_deaths(self, message: Message) -> None:
        """Waits until this server knows of the dead servers that a worker has seen.

        Raises:
            PeerDiedError: One of them lives.
        """
        asked = {i for i in range(message.dead.bit_length()) if message.dead >> i & 1}
        with self._dead_changed:
            if self._dead_changed.wait_for(lambda: asked <= self._dead, _DEATH_S):
                return
        alive = min(asked - self._dead)
        raise PeerDiedError(
            f"parameter server: server {alive} answers server {self._server}, but not worker "
            f"{message.worker}: that worker cannot go on",
            alive,
        )

    def _decides(self, part: Part) -> bool:
        living = [owner for owner in part.owners if owner not in self._dead]
        return bool(living) and living[0] == self._server

    def _copy(
        self, push: Message, part: int, shard: Shard, gradient: Gradient, factor: float
    ) -> None:
        """Passes a push on to the holders of copies, with what is decided on it."""
        if len(shard.part.owners) == 1:
            return
        body, rows = _bytes(gradient.values), ALL_ROWS
        if gradient.places is not None:
            body, rows = torch.cat([_bytes(gradient.places), body]), len(gradient.places)
        what = Message(Kind.COPY, push.table, part, push.worker, push.clock, push.number)
        what.count, what.body, what.factor = rows, body, factor
        what.weight, what.rate = gradient.weight, gradient.rate
        self._tell_copies(shard.part, what)

    def _tell_copies(self, part: Part, message: Message) -> None:
        for server in part.owners:
            if server == self._server or server in self._dead:
                continue
            link, lock = self._links[server]
            with lock:
                try:
                    link.send(message)
                    answer = link.receive()
                except PeerDiedError:
                    # This thread holds the lock of a shard, and `forget` takes those of others.
                    threading.Thread(target=self.forget, args=(server,), daemon=True).start()
                    continue
            raise_failure(answer)

    def _count(self, staleness: int, times: int = 1) -> None:
        with self._counting:
            self.staleness[staleness] += times

    def _drop(self, why: str) -> None:
        with self._counting:
            self.dropped[why] += 1


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


__all__ = ["Updates"]
