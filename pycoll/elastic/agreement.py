"""Agreement of the surviving ranks on the members of a new world: the lowest live rank decides.

Each rank connects to all lower ranks. A rank that finds none of them alive is the coordinator: it
waits until every higher rank has connected, has ended or is unreachable, and then decides on the
members. A rank has ended if its kernel refuses connections. A rank that does not answer is lost,
but may be alive behind a broken cable. So a new world needs more than half of the ranks that may be
alive, or exactly half including the lowest of them: two such worlds would share a rank, and no rank
takes part in two.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

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
from pycoll.errors import PeerDiedError, TimeoutError

_ATTEMPT_S = 1.0
_RETRY_S = 0.1


class Agreement:
    """One rank's part in an agreement.

    Args:
        port: This rank's port.
        serve: Opens the new world's store at an address of this host, should this rank coordinate,
            and returns its port.
        timeout_s: Seconds in which live ranks must connect.
        silence_s: Seconds after which a rank that does not answer is lost; 0: `timeout_s`.
    """

    def __init__(
        self, port: OwnerPort, serve: Callable[[str], int], timeout_s: float, silence_s: float
    ) -> None:
        self._port = port
        self._serve = serve
        self._timeout_s = timeout_s
        self._silence_s = silence_s or timeout_s
        self._server = port.server
        self._ended = port.server.ended
        self._lost: set[int] = set()

    async def run(self) -> Verdict:
        """Runs the agreement, on the port's thread; the verdict is identical on all members.

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

    async def _decided(self, lower: list[asyncio.Task[Verdict | None]]) -> Verdict | None:
        """Decision of a lower rank; None when no lower rank is alive."""
        waiting: set[asyncio.Task[Verdict | None]] = set(lower)
        # A lower rank that started later, but in time, decides after this rank's deadline.
        while waiting and (left := self._seconds_left() + self._timeout_s) > 0:
            done, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (verdict := task.result()) is not None:
                    return verdict
        if waiting:
            who = sorted(set(range(self._port.rank)) - self._ended - self._lost)
            raise TimeoutError(
                f"shrink: {_ranks(who)} did not call it within {self._timeout_s:g} s, but still "
                "run: they are computing, or this rank was late and they formed a world without it"
            )
        return None

    # --- as a rank that follows a lower rank ---

    async def _follow(self, peer: int) -> Verdict | None:
        """Decision of `peer`, or None once it has ended."""
        last_seen = asyncio.get_running_loop().time()
        while True:
            if (link := await self._connect(peer)) is not None:
                last_seen = asyncio.get_running_loop().time()
                with contextlib.suppress(*BROKEN):
                    return await self._hear_out(peer, *link)
            elif peer in self._ended:
                return None
            elif asyncio.get_running_loop().time() - last_seen > self._silence_s:
                self._lost.add(peer)
                return None
            await asyncio.sleep(_RETRY_S)

    async def _connect(self, peer: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connects to the rank's port; records the rank as ended if its host refuses."""
        address: Address = self._port.addresses[peer]
        refused = 0
        for host in address.hosts:
            try:
                return await asyncio.wait_for(
                    asyncio.open_connection(host, address.port, limit=MAX_LINE), _ATTEMPT_S
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
    ) -> Verdict | None:
        """Greets a rank that may not listen yet, and waits for its decision."""
        try:
            own = secrets.token_bytes(NONCE_BYTES)
            nonces = nonce(await read_message(reader)) + own
            rank = self._port.rank
            own_proof = self._port.proof("follower", rank, nonces)
            hello = Hello(rank, own, frozenset(self._ended), own_proof)
            await write_message(writer, hello.to_message())
            answer = proof(await read_message(reader))
            if not secrets.compare_digest(answer, self._port.proof("coordinator", peer, nonces)):
                raise ValueError("an unauthenticated peer")
            decided = await read_message(reader)
            if (reason := refusal(decided)) is not None:
                raise PeerDiedError(reason)
            return Verdict.read(decided, rank, self._port.size)
        finally:
            writer.close()

    # --- as the coordinator of higher ranks ---

    async def _coordinate(self) -> Verdict:
        """Waits for all higher ranks that may connect, and decides."""
        higher = range(self._port.rank + 1, self._port.size)
        probes = [asyncio.create_task(self._probe(rank)) for rank in higher]
        try:
            while self._seconds_left() > 0 and not all(
                rank in self._server.joined or rank in self._ended | self._lost for rank in higher
            ):
                self._server.changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    wait_s = min(0.5, self._seconds_left())
                    await asyncio.wait_for(self._server.changed.wait(), wait_s)
        finally:
            await cancel(probes)
        members = sorted({self._port.rank, *self._server.joined})
        ended = self._ended - set(members)
        if not all(quorum.is_met(members, ended) for quorum in self._port.quorums):
            text = _minority(members, ended, self._port.size)
            await self._tell({"refused": text})
            raise PeerDiedError(text)
        host = self._reached_at()
        verdict = Verdict(members, sorted(ended), secrets.token_hex(16), host, self._serve(host))
        await self._tell(verdict.to_message())
        return verdict

    def _reached_at(self) -> str:
        """The address of this host to which most ranks have connected."""
        names = [writer.get_extra_info("sockname")[0] for writer in self._server.joined.values()]
        hosts = [name.removeprefix("::ffff:") for name in names]
        return max(hosts, key=hosts.count, default="127.0.0.1")

    async def _probe(self, peer: int) -> None:
        """Checks repeatedly whether the rank's process is alive."""
        last_seen = asyncio.get_running_loop().time()
        while peer not in self._ended:
            if (link := await self._connect(peer)) is not None:
                link[1].close()
                last_seen = asyncio.get_running_loop().time()
                self._lost.discard(peer)
            elif asyncio.get_running_loop().time() - last_seen > self._silence_s:
                self._lost.add(peer)
            self._server.changed.set()
            await asyncio.sleep(2 * _RETRY_S)

    async def _tell(self, what: dict[str, Any]) -> None:
        """Sends the decision to the ranks that have connected, and disconnects them."""
        joined = list(self._server.joined.values())
        self._server.joined.clear()
        for writer in joined:
            with contextlib.suppress(OSError):
                await write_message(writer, what)
            writer.close()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _minority(members: list[int], ended: set[int], size: int) -> str:
    missing = sorted(set(range(size)) - set(members) - ended)
    return (
        f"shrink: only {_ranks(members)} of {size} came; {_ranks(missing)} may go on elsewhere, "
        "behind a network failure: expected more than half of the ranks that may be alive, or half "
        "including the lowest of them"
    )
