"""What a server decides on pushes: when a step is complete, and that copies have it before."""

from __future__ import annotations

import threading
from collections import Counter

import torch
from torch import Tensor

from pycoll.parallel.ps.consistency import Consistency, Damping
from pycoll.parallel.ps.copies import Copies
from pycoll.parallel.ps.held_tables import HeldTable, HeldTables
from pycoll.parallel.ps.members import Members
from pycoll.parallel.ps.messages import (
    ALL_ROWS,
    DROP,
    HOLD,
    Kind,
    Message,
)
from pycoll.parallel.ps.shard import Gradient, Shard


class Updates:
    """Decides on the pushes of the parts whose first living holder is this server.

    Attributes:
        copies: The other servers, which have copies.
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
        self._members, self._tables = members, tables
        self._consistency, self._damping = consistency, damping
        self.copies = Copies(server, tables, self.forget)
        self._counting = threading.Lock()
        self.staleness: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()

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
            self.copies.tell(held, part, apply)
            shard.apply_held(apply.clock)

    def settle_all(self) -> None:
        """Looks at all shards again, after the workers or the servers have changed."""
        if not self._consistency.gathers:
            return
        for held in self._tables.all():
            for part, shard in list(held.shards.items()):
                if self.copies.decides(shard.part):
                    with shard.lock:
                        self.settle(held, part)

    def forget(self, server: int) -> None:
        """Another server has died: this one decides where it is the next holder."""
        if self.copies.forget(server):
            self.settle_all()
            self.copies.restore_all()

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
        self.copies.tell(self._tables.of(push), part, what)

    def _count(self, staleness: int, times: int = 1) -> None:
        with self._counting:
            self.staleness[staleness] += times

    def _drop(self, why: str) -> None:
        with self._counting:
            self.dropped[why] += 1


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


__all__ = ["Updates"]
