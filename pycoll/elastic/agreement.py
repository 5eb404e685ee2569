"""Agreement of the surviving ranks: the lowest live rank decides.

Each rank connects to all lower ranks. A rank that finds none of them alive is the coordinator: it
waits until every higher rank has connected, has ended or is unreachable, and then decides on the
members. A rank has ended if its kernel refuses connections. A rank that does not answer is lost,
but may be alive behind a broken cable. So a new world needs more than half of the ranks that may be
alive, or exactly half including the lowest of them: two such worlds would share a rank, and no rank
takes part in two.

`ShrinkAgreement` decides on the members of a new world, `ValueAgreement` (value_agreement.py) on a
number.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from pycoll.elastic.messages import (
    BROKEN,
    MAX_LINE,
    NONCE_BYTES,
    Hello,
    Verdict,
    nonce,
    proof,
    read_message,
    refusal,
    write_message,
)
from pycoll.elastic.owner_port import Address, OwnerPort
from pycoll.elastic.port_server import cancel
from pycoll.elastic.retries import ATTEMPT_S, waits_between_attempts_s
from pycoll.errors import PeerDiedError, TimeoutError

# What a coordinator decides, as JSON. {"refused": text}: nothing, because it is in a minority.
Outcome: TypeAlias = dict[str, Any]


class Agreement:
    """One rank's part in an agreement.

    Args:
        port: This rank's port.
        topic: What the ranks agree on: ranks with different topics do not meet.
        value: What this rank contributes: nothing, or an op and a number.
        timeout_s: Seconds in which live ranks must connect.
        silence_s: Seconds after which a rank that does not answer is lost; 0: `timeout_s`.
        has_died: Whether a rank is a process of this host that has ended. The kernel keeps its port
            open until it has freed its memory.
    """

    name = ""  # of the method, for errors
    why_late = ""  # why live ranks may not have called it

    def __init__(
        self,
        port: OwnerPort,
        topic: str,
        value: tuple[str, int] | None,
        timeout_s: float,
        silence_s: float,
        has_died: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self._has_died_here = has_died
        self._port = port
        self._topic = topic
        self._value = value
        self._timeout_s = timeout_s
        self._silence_s = silence_s or timeout_s
        self._server = port.server
        self._ended = port.server.ended
        self._lost: set[int] = set()

    def decide(self, members: dict[int, Any]) -> Outcome:
        """Decides as the coordinator, from the values of the members by rank."""
        raise NotImplementedError

    def read(self, message: Mapping[str, Any]) -> Outcome:
        """Checks a decision that another rank has sent; raises one of BROKEN."""
        raise NotImplementedError

    def decide_without(self, missing: list[int]) -> Outcome | None:
        """Decides at the deadline if live ranks are missing; None: `decide`, by majority."""

    async def settle(self, outcome: Outcome) -> Outcome:
        """Makes sure that later coordinators decide the same; returns the decision."""
        return outcome

    async def run(self) -> Outcome:
        """Runs the agreement, on the port's thread; the decision is identical on all members.

        Raises:
            PeerDiedError: This rank is not in a majority.
            TimeoutError: A lower rank is alive, but did not decide before the deadline.
        """
        self._end = asyncio.get_running_loop().time() + self._timeout_s
        lower = [asyncio.create_task(self._follow(r)) for r in range(self._port.rank)]
        try:
            return await self._decided(lower) or await self._coordinate()
        finally:
            await cancel(lower)

    def _seconds_left(self) -> float:
        return self._end - asyncio.get_running_loop().time()

    async def _decided(self, lower: list[asyncio.Task[Outcome | None]]) -> Outcome | None:
        """Decision of a lower rank; None when no lower rank is alive."""
        waiting: set[asyncio.Task[Outcome | None]] = set(lower)
        # A lower rank that started later, but in time, decides after this rank's deadline.
        while waiting and (left := self._seconds_left() + self._timeout_s) > 0:
            done, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (outcome := task.result()) is not None:
                    return outcome
        if waiting:
            who = sorted(set(range(self._port.rank)) - self._ended - self._lost)
            raise TimeoutError(self.late_text(who))
        return None

    def late_text(self, ranks: list[int]) -> str:
        state = "still runs: it is" if len(ranks) == 1 else "still run: they are"
        return (
            f"{self.name}: {_ranks(ranks)} did not call it within {self._timeout_s:g} s, but "
            f"{state} computing{self.why_late}"
        )

    # --- as a rank that follows a lower rank ---

    async def _follow(self, peer: int) -> Outcome | None:
        """Decision of `peer`, or None once it has ended."""
        last_seen = asyncio.get_running_loop().time()
        waits_s = waits_between_attempts_s()
        while True:
            if self._has_died(peer):
                return None
            if (link := await self.connect(peer)) is not None:
                last_seen = asyncio.get_running_loop().time()
                with contextlib.suppress(*BROKEN):
                    return await self._hear_out(peer, *link)
            elif peer in self._ended:
                return None
            elif asyncio.get_running_loop().time() - last_seen > self._silence_s:
                self._lost.add(peer)
                return None
            await asyncio.sleep(next(waits_s))

    def _has_died(self, peer: int) -> bool:
        """Whether the rank has ended; looks on this host, and records it."""
        if peer not in self._ended and self._has_died_here(peer):
            self._ended.add(peer)
        return peer in self._ended

    async def connect(self, peer: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connects to the rank's port; records the rank as ended if its host refuses."""
        address: Address = self._port.addresses[peer]
        refused = 0
        for host in address.hosts:
            try:
                return await asyncio.wait_for(
                    asyncio.open_connection(host, address.port, limit=MAX_LINE), ATTEMPT_S
                )
            except ConnectionRefusedError:
                refused += 1
            except (OSError, asyncio.TimeoutError):
                pass
        if refused == len(address.hosts):
            self._ended.add(peer)
        return None

    async def _hear_out(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Outcome:
        """Greets a rank that may not listen yet, and waits for its decision."""
        try:
            await self.greet(peer, reader, writer)
            message = await read_message(reader)
            if (reason := refusal(message)) is not None:
                raise PeerDiedError(reason)
            return self.read(message)
        finally:
            writer.close()

    async def greet(
        self,
        peer: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        proposal: Outcome | None = None,
    ) -> dict[str, Any]:
        """Sends a hello with a proof, and returns the peer's answer, whose proof is right."""
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = nonce(await read_message(reader)) + own
        rank = self._port.rank
        own_proof = self._port.proof("follower", rank, nonces)
        hello = Hello(rank, own, frozenset(self._ended), own_proof, self._topic, self._value)
        await write_message(writer, replace(hello, proposal=proposal).to_message())
        answer = await read_message(reader)
        right = self._port.proof("coordinator", peer, nonces)
        if not secrets.compare_digest(proof(answer), right):
            raise ValueError("an unauthenticated peer")
        return answer

    # --- as the coordinator of higher ranks ---

    async def _coordinate(self) -> Outcome:
        """Waits for all higher ranks that may connect, and decides."""
        # A lower rank that has ended may have told its decision to some ranks.
        outcome = self._proposed() or await self._gather()
        outcome = await self.settle(outcome)
        await self.tell(outcome)
        return outcome

    def _proposed(self) -> Outcome | None:
        with contextlib.suppress(*BROKEN):
            return self.read(self._server.accepted[self._topic])
        return None

    @property
    def higher(self) -> range:
        return range(self._port.rank + 1, self._port.size)

    async def _gather(self) -> Outcome:
        probes = [asyncio.create_task(self._probe(rank)) for rank in self.higher]
        try:
            while (missing := self._missing()) and self._seconds_left() > 0:
                self._server.changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    wait_s = min(0.5, self._seconds_left())
                    await asyncio.wait_for(self._server.changed.wait(), wait_s)
            # Before other tasks run: a member that ends now counts, and would be missing later.
            joined = self._server.members(self._topic)
            members = {self._port.rank: self._value} | {r: m.value for r, m in joined.items()}
        finally:
            await cancel(probes)
        if missing and (outcome := self.decide_without(missing)) is not None:
            return outcome
        await self.check_majority(set(members))
        return self.decide(dict(sorted(members.items())))

    def _missing(self) -> list[int]:
        known = self._ended | self._lost | set(self._server.members(self._topic))
        return [rank for rank in self.higher if rank not in known]

    async def check_majority(self, members: set[int]) -> None:
        """Raises PeerDiedError on all members if other ranks may go on without them."""
        ended = self._ended - members
        if not all(quorum.is_met(members, ended) for quorum in self._port.quorums):
            text = _minority(self.name, sorted(members), ended, self._port.size)
            await self.tell({"refused": text})
            raise PeerDiedError(text)

    def reached_at(self) -> str:
        """The address of this host to which most ranks have connected."""
        joined = self._server.members(self._topic).values()
        names = [member.writer.get_extra_info("sockname")[0] for member in joined]
        hosts = [name.removeprefix("::ffff:") for name in names]
        return max(hosts, key=hosts.count, default="127.0.0.1")

    async def _probe(self, peer: int) -> None:
        """Checks repeatedly whether the rank's process is alive."""
        last_seen, waits_s = asyncio.get_running_loop().time(), waits_between_attempts_s()
        while not self._has_died(peer):
            if (link := await self.connect(peer)) is not None:
                link[1].close()
                last_seen = asyncio.get_running_loop().time()
                self._lost.discard(peer)
            elif asyncio.get_running_loop().time() - last_seen > self._silence_s:
                self._lost.add(peer)
            self._server.changed.set()
            await asyncio.sleep(next(waits_s))
        self._server.changed.set()

    async def tell(self, outcome: Outcome) -> None:
        """Sends the decision to the ranks that have connected, and disconnects them."""
        for member in self._server.dismiss(self._topic):
            with contextlib.suppress(OSError):
                await write_message(member.writer, outcome)
            member.writer.close()


class ShrinkAgreement(Agreement):
    """Agreement on the members of a new world.

    Args:
        port: This rank's port.
        serve: Opens the new world's store at an address of this host, should this rank coordinate,
            and returns its port.
        timeout_s: Seconds in which live ranks must connect.
        silence_s: Seconds after which a rank that does not answer is lost; 0: `timeout_s`.
        has_died: Whether a rank is a process of this host that has ended.
    """

    name = "shrink"
    why_late = ", or this rank was late and they formed a world without it"

    def __init__(
        self,
        port: OwnerPort,
        serve: Callable[[str], int],
        timeout_s: float,
        silence_s: float,
        has_died: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        super().__init__(port, "shrink", None, timeout_s, silence_s, has_died)
        self._serve = serve

    def decide(self, members: dict[int, Any]) -> Outcome:
        host, ended = self.reached_at(), sorted(self._ended - set(members))
        name = secrets.token_hex(16)
        return Verdict([*members], ended, name, host, self._serve(host)).to_message()

    def read(self, message: Mapping[str, Any]) -> Outcome:
        return Verdict.read(message, self._port.rank, self._port.size).to_message()

    async def verdict(self) -> Verdict:
        """Runs the agreement, on the port's thread."""
        return Verdict(**await self.run())


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _minority(name: str, members: list[int], ended: set[int], size: int) -> str:
    missing = sorted(set(range(size)) - set(members) - ended)
    return (
        f"{name}: only {_ranks(members)} of {size} came; {_ranks(missing)} may go on "
        "elsewhere, behind a network failure: expected more than half of the ranks that may be "
        "alive, or half including the lowest of them"
    )
