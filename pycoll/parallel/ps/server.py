"""A server: answers the questions of workers, and of servers whose rows it has copies of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from pycoll.errors import Error, TimeoutError
from pycoll.parallel.core import structures
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.ps.consistency import Consistency, Damping
from pycoll.parallel.ps.held_tables import HeldTables
from pycoll.parallel.ps.keys import HashRing, Table
from pycoll.parallel.ps.members import Members
from pycoll.parallel.ps.messages import (
    ALL_ROWS,
    Kind,
    Link,
    Message,
    failed,
    json_body,
    json_of,
)
from pycoll.parallel.ps.optimizers import MakeOptimizer
from pycoll.parallel.ps.shard import Gradient, Shard
from pycoll.parallel.ps.snapshot import pack, unpack
from pycoll.parallel.ps.updates import Updates


class Server:
    """Holds rows of tables, and answers questions; any thread may ask.

    Locks are taken in one order: that of a shard, then that of the members.

    Attributes:
        ledger: Counts its messages to holders of copies.

    Args:
        number: Number of this server.
        ring: Which server holds which rows.
        num_workers: Workers at the start.
        consistency: When workers may pull, and what an update is.
        optimizer: Makes the optimizer of each shard; by name of the table, or one for all.
        damping: What happens to stale gradients.
        seed: Seed of the tables' first values.
        timeout_s: Longest wait of a pull for other workers, seconds.
        settings: What a worker that comes later has to know.
    """

    def __init__(
        self,
        number: int,
        ring: HashRing,
        num_workers: int,
        consistency: Consistency,
        optimizer: MakeOptimizer | Mapping[str, MakeOptimizer],
        *,
        damping: Damping | None = None,
        seed: int = 0,
        timeout_s: float = 50.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.number, self._consistency, self._timeout_s = number, consistency, timeout_s
        self._settings = dict(settings or {})
        self.members = Members(num_workers)
        self.ledger = Ledger()
        self._tables = HeldTables(number, ring, optimizer, seed)
        self._updates = Updates(
            number, consistency, damping or Damping(), self.members, self._tables
        )

    def connect(self, links: Mapping[int, Link]) -> None:
        """Hears of the links to other servers, which hold copies."""
        self._updates.copies.connect(links)

    def disconnect(self) -> None:
        """Ends the links to other servers: no worker will push any more."""
        self._updates.copies.disconnect()

    def handle(self, message: Message) -> Message:
        """Answers a question; an error is an answer, too."""
        try:
            answer = _ANSWERS.get(message.kind)
            if answer is None:
                raise Error(f"server {self.number}: {message.kind.name} is no question")
            is_news = message.kind not in _OF_SERVERS and self.members.hear(
                message.worker, message.clock
            )
            if is_news:
                self._updates.settle_all()
            return answer(self, message)
        except Error as error:
            return failed(error)

    def forget_worker(self, worker: int) -> None:
        """A worker has left or died: no step waits for it any more."""
        self.members.leave(worker)
        self._updates.settle_all()

    def forget_server(self, server: int) -> None:
        """Another server has died."""
        self._updates.forget(server)

    def _hello(self, message: Message) -> Message:
        asked = json_of(message, "a worker")
        number, clock = self.members.come(asked["worker"], asked["clock"])
        return Message(Kind.ANSWER, worker=number, clock=clock, body=json_body(self._settings))

    def _register(self, message: Message) -> Message:
        asked = json_of(message, "a worker")
        fields = asked["table"]
        fields["dtype"] = structures.dtype_of(fields["dtype"])
        self._tables.register(Table(**fields), message.worker)
        if message.worker == 0 and not asked["has_values"]:
            for shard in self._tables.of(message).shards.values():
                shard.begin()
        return Message(Kind.ANSWER)

    def _init(self, message: Message) -> Message:
        held = self._tables.of(message)
        shards = [held.shards[part] for part in held.layout.held_by(self.number)]
        sizes = [len(shard.values) for shard in shards]
        values = self._tables.values(message, sum(sizes))
        for shard, rows in zip(shards, values.split(sizes), strict=True):
            shard.set(rows)
            shard.begin()
        return Message(Kind.ANSWER)

    def _take_state(self, message: Message) -> Message:
        self._updates.copies.check_deaths(message)
        held = self._tables.of(message)
        parts = held.layout.decided_by(self.number, message.dead)
        found = {part: held.shard(part).optimizer_state() for part in parts}
        return Message(Kind.ANSWER, body=pack(found))

    def _put_state(self, message: Message) -> Message:
        held = self._tables.of(message)
        for part, state in unpack(message.body, f"worker {message.worker}").items():
            held.shard(part).put_optimizer_state(state)
        return Message(Kind.ANSWER)

    def _pull(self, message: Message) -> Message:
        self._updates.copies.check_deaths(message)
        rows = self._tables.rows(message)
        if rows is None:
            return Message(Kind.UNKNOWN_KEYS)
        may_go_on = not self._consistency.needs_clocks or self.members.wait_for_others(
            message.worker, message.clock, self._consistency, self._timeout_s
        )
        if not may_go_on:
            raise self._too_late(message)
        table, version = self._tables.of(message).table, 0
        size = sum(len(of.shard.values if of.places is None else of.places) for of in rows)
        values = torch.empty(size, table.dim, dtype=table.dtype)
        for of in rows:
            with of.shard.lock:
                self._wait_for_version(of.shard, message)
                of.shard.pulled[message.worker] = of.shard.version
                version = max(version, of.shard.version)
                values[of.where] = of.shard.read(of.places)
        self.members.has_pulled(message.worker)
        return Message(Kind.ANSWER, clock=version, body=values.view(-1).view(torch.uint8))

    def _push(self, message: Message) -> Message:
        self._updates.copies.check_deaths(message)
        rows = self._tables.rows(message)
        if rows is None:
            return Message(Kind.UNKNOWN_KEYS)
        size = sum(len(of.shard.values if of.places is None else of.places) for of in rows)
        values = self._tables.values(message, size)
        self.members.has_pushed(message.worker)
        held, of_part, late = self._tables.of(message), {of.part: of for of in rows}, 0
        for part in held.layout.decided_by(self.number, message.dead):
            of = of_part.get(part)
            if of is None and not self._consistency.gathers:
                continue  # where gradients are gathered, a push without rows counts, too
            places = torch.zeros(0, dtype=torch.int64) if of is None else of.places
            gradient = Gradient(
                places,
                values[:0] if of is None else values[of.where],
                message.weight,
                message.rate,
            )
            shard = held.shard(part)
            with shard.lock:
                self._wait_for_values(shard, message)
                late += not self._updates.push(message, part, shard, gradient)
        return Message(Kind.ANSWER, number=late)

    def _clock(self, message: Message) -> Message:
        return Message(Kind.ANSWER)

    def _step(self, message: Message) -> Message:
        held = self._tables.of(message)
        parts = held.layout.decided_by(self.number, message.dead)
        return Message(Kind.ANSWER, clock=max((held.shard(i).version for i in parts), default=0))

    def _leave(self, message: Message) -> Message:
        self.forget_worker(message.worker)
        return Message(Kind.ANSWER)

    def _report(self, message: Message) -> Message:
        updates, members = self._updates, self.members
        with members.changed:
            found: dict[str, Any] = {
                "staleness": {str(key): n for key, n in sorted(updates.staleness.items())},
                "dropped": dict(updates.dropped),
                "waited_s": {str(key): s for key, s in members.waited_s.items()},
                "computing_s": {str(key): s for key, s in members.computing_s().items()},
                "clocks": {str(key): clock for key, clock in members.clocks.items()},
                "largest_gap": members.largest_gap,
                "nbytes": {
                    name: [entry.calls, entry.nbytes]
                    for (_, name), entry in self.ledger.entries.items()
                },
            }
        return Message(Kind.ANSWER, body=json_body(found))

    def _take_copy(self, message: Message) -> Message:
        shard = self._tables.of(message).shard(message.part)
        places, num_rows = None, len(shard.values)
        if message.count != ALL_ROWS:
            num_rows = message.count
            places = message.body[: 8 * num_rows].view(torch.int64)
        values = self._tables.values(message, num_rows)
        with shard.lock:
            self._wait_for_values(shard, message)
            gradient = Gradient(places, values, message.weight, message.rate)
            shard.take(message, gradient, message.factor)
        return Message(Kind.ANSWER)

    def _apply(self, message: Message) -> Message:
        shard = self._tables.of(message).shard(message.part)
        with shard.lock:
            shard.apply_held(message.clock)
        return Message(Kind.ANSWER)

    def _restore(self, message: Message) -> Message:
        self._tables.restore(message)
        return Message(Kind.ANSWER)

    def _wait_for_version(self, shard: Shard, message: Message) -> None:
        start_s = time.monotonic()
        self._wait_for_values(shard, message)

        def may() -> bool:
            return not self._consistency.gathers or shard.version >= message.clock

        if may():
            return
        if not shard.changed.wait_for(may, self._timeout_s):
            raise self._too_late(message)
        self.members.add_wait(message.worker, time.monotonic() - start_s)

    def _wait_for_values(self, shard: Shard, message: Message) -> None:
        """Waits for the first values: an update before them would be lost."""
        if not shard.changed.wait_for(lambda: shard.is_ready, self._timeout_s):
            raise TimeoutError(
                f"{message.kind.name.lower()}: worker {message.worker} waited "
                f"{self._timeout_s:g} s for the first values of table {shard.table.name!r}, which "
                "worker 0 sends when it registers"
            )

    def _too_late(self, message: Message) -> TimeoutError:
        return TimeoutError(
            f"pull: worker {message.worker} at clock {message.clock} waited {self._timeout_s:g} s "
            f"for {self.members.latest()} ({self._consistency})"
        )


_ANSWERS = {
    Kind.HELLO: Server._hello,
    Kind.REGISTER: Server._register,
    Kind.INIT: Server._init,
    Kind.PULL: Server._pull,
    Kind.PUSH: Server._push,
    Kind.CLOCK: Server._clock,
    Kind.STEP: Server._step,
    Kind.LEAVE: Server._leave,
    Kind.REPORT: Server._report,
    Kind.COPY: Server._take_copy,
    Kind.APPLY: Server._apply,
    Kind.RESTORE: Server._restore,
    Kind.TAKE_STATE: Server._take_state,
    Kind.PUT_STATE: Server._put_state,
}
_OF_SERVERS = (Kind.COPY, Kind.APPLY, Kind.RESTORE)  # questions of other servers

__all__ = ["Server"]
