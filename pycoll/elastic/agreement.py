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
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pycoll.elastic.owner_port import Address, OwnerPort
from pycoll.errors import PeerDiedError, TimeoutError

_ATTEMPT_S = 1.0
_RETRY_S = 0.1
_STRANGER_S = 5.0
_MAX_STRANGERS = 128
_MAX_LINE = 1 << 16
_BROKEN = (OSError, EOFError, asyncio.LimitOverrunError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Verdict:
    """Members of the new world, and the address of its store.

    Attributes:
        ranks: Ranks of the old world, ascending.
        name: Name of the new world.
        host: Host of its store.
        port: Port of its store.
    """

    ranks: list[int]
    name: str
    host: str
    port: int


def may_go_on(members: Iterable[int], ended: Iterable[int], size: int) -> bool:
    """Whether these ranks of a world of `size` can be sure that no other ranks form a world."""
    alive = sorted(set(range(size)) - (set(ended) - set(members)))
    votes = 2 * len(set(members))
    return votes > len(alive) or (votes == len(alive) and alive[0] in members)


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
        self._ended: set[int] = set()
        self._lost: set[int] = set()
        self._joined: dict[int, asyncio.StreamWriter] = {}
        self._strangers: set[asyncio.Task[None]] = set()
        self._heard: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self) -> Verdict:
        """Runs the agreement; the verdict is identical on all members.

        Raises:
            PeerDiedError: This rank is not in a majority.
            TimeoutError: A lower rank is alive, but did not decide before the deadline.
        """
        self._end = asyncio.get_running_loop().time() + self._timeout_s
        server = await asyncio.start_server(
            self._hear, sock=self._port.socket.dup(), limit=_MAX_LINE
        )
        lower = [asyncio.create_task(self._follow(r)) for r in range(self._port.rank)]
        try:
            return await self._decided(lower) or await self._coordinate()
        finally:
            server.close()
            await _cancel([*lower, *self._heard])

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
                with contextlib.suppress(*_BROKEN):
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
                    asyncio.open_connection(host, address.port, limit=_MAX_LINE), _ATTEMPT_S
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
            theirs = bytes.fromhex((await _read(reader))["nonce"])
            nonces = theirs + (own := secrets.token_bytes(32))
            rank = self._port.rank
            hello = {"rank": rank, "nonce": own.hex(), "ended": sorted(self._ended)}
            await _write(writer, hello | {"proof": self._port.proof("follower", rank, nonces)})
            answer = await _read(reader)
            if not secrets.compare_digest(
                answer["proof"], self._port.proof("coordinator", peer, nonces)
            ):
                raise ValueError("an unauthenticated peer")
            decided = await _read(reader)
        finally:
            writer.close()
        if "refused" in decided:
            raise PeerDiedError(decided["refused"])
        return Verdict(**decided)

    # --- as the coordinator of higher ranks ---

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles a connection of a rank, or of an unauthenticated peer, which soon times out."""
        task = asyncio.current_task()
        assert task is not None
        self._heard.add(task)
        self._strangers.add(task)
        rank = None
        try:
            if len(self._strangers) <= _MAX_STRANGERS:
                with contextlib.suppress(asyncio.TimeoutError):
                    rank = await asyncio.wait_for(self._greeted(reader, writer), _STRANGER_S)
            if rank is not None:
                self._strangers.discard(task)
                self._joined[rank] = writer
                self._changed.set()
                await reader.read()  # until the peer disconnects
        except (*_BROKEN, asyncio.CancelledError):
            pass  # otherwise asyncio prints the cancellation of a handler
        finally:
            self._heard.discard(task)
            self._strangers.discard(task)
            if rank is not None and self._joined.get(rank) is writer:
                del self._joined[rank]
                self._changed.set()
            writer.close()

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Authenticates the peer and returns its rank."""
        own = secrets.token_bytes(32)
        await _write(writer, {"nonce": own.hex()})
        hello = await _read(reader)
        nonces = own + bytes.fromhex(hello["nonce"])
        rank = int(hello["rank"])
        if not secrets.compare_digest(hello["proof"], self._port.proof("follower", rank, nonces)):
            return None
        self._ended |= set(map(int, hello["ended"]))
        await _write(writer, {"proof": self._port.proof("coordinator", self._port.rank, nonces)})
        return rank

    async def _coordinate(self) -> Verdict:
        """Waits for all higher ranks that may connect, and decides."""
        higher = range(self._port.rank + 1, self._port.size)
        probes = [asyncio.create_task(self._probe(rank)) for rank in higher]
        try:
            while self._seconds_left() > 0 and not all(
                rank in self._joined or rank in self._ended | self._lost for rank in higher
            ):
                self._changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(0.5, self._seconds_left()))
        finally:
            await _cancel(probes)
        members = sorted({self._port.rank, *self._joined})
        ended = self._ended - set(members)
        if not may_go_on(members, ended, self._port.size):
            text = _minority(members, ended, self._port.size)
            await self._tell({"refused": text})
            raise PeerDiedError(text)
        host = self._reached_at()
        verdict = Verdict(members, secrets.token_hex(16), host, self._serve(host))
        await self._tell(asdict(verdict))
        return verdict

    def _reached_at(self) -> str:
        """The address of this host to which most ranks have connected."""
        names = [writer.get_extra_info("sockname")[0] for writer in self._joined.values()]
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
            self._changed.set()
            await asyncio.sleep(2 * _RETRY_S)

    async def _tell(self, what: dict[str, Any]) -> None:
        for writer in list(self._joined.values()):
            with contextlib.suppress(OSError):
                await _write(writer, what)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks repeatedly: wait_for before Python 3.12 may swallow a cancellation."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_RETRY_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = await reader.readuntil(b"\n")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


async def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _minority(members: list[int], ended: set[int], size: int) -> str:
    missing = sorted(set(range(size)) - set(members) - ended)
    return (
        f"shrink: only {_ranks(members)} of {size} came; {_ranks(missing)} may go on elsewhere, "
        "behind a network failure: expected more than half of the ranks that may be alive, or half "
        "including the lowest of them"
    )
