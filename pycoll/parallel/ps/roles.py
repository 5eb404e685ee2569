"""Servers and workers on the ranks of a communicator: pairs of ranks, threads, and the end.

Each rank that asks and each server that answers have a communicator of two ranks. So the end of a
rank breaks its own pairs alone, and each thread waits on a communicator of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pycoll import threads
from pycoll.communicator import Communicator
from pycoll.errors import Error, PeerDiedError, UsageError
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.ps.messages import Kind, Link, Message, RemoteLink, failed, receive, send
from pycoll.parallel.ps.server import Server

FOREVER_S = 1e6  # a server may not be asked for as long as a worker computes


class LocalLink:
    """A link to a server of the same rank: a call."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answer: Message | None = None

    def send(self, message: Message) -> None:
        """See Link."""
        self._answer = self._server.handle(message)

    def receive(self) -> Message:
        """See Link."""
        assert self._answer is not None
        return self._answer

    def close(self) -> None:
        """See Link."""


class Answering:
    """The threads of a server: one for each rank that asks."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._of_workers: list[threading.Thread] = []
        self._of_servers: list[threading.Thread] = []
        self._pairs: list[Communicator] = []
        self._failure: Exception | None = None

    def answer_worker(self, comm: Communicator, worker: int = -1) -> None:
        """Starts to answer a worker; one without a number gets one when it says hello."""
        self._start(self._of_workers, comm, worker, -1)

    def answer_server(self, comm: Communicator, number: int) -> None:
        """Starts to answer another server, which sends copies."""
        self._start(self._of_servers, comm, -1, number)

    def _start(
        self, of: list[threading.Thread], comm: Communicator, worker: int, other_server: int
    ) -> None:
        comm.timeout_s = FOREVER_S
        self._pairs.append(comm)
        thread = threading.Thread(
            target=self._answer_all, args=(comm, worker, other_server), daemon=True
        )
        of.append(thread)
        threads.start(thread, "a thread of a parameter server")

    def _answer_all(self, comm: Communicator, worker: int, other_server: int) -> None:
        peer = 1 - comm.rank
        try:
            while True:
                question = receive(comm, peer)
                answer = self._answer_one(question)
                if question.kind == Kind.HELLO:
                    worker = answer.worker
                send(comm, peer, answer)
        except PeerDiedError:
            pass  # it has ended, or left
        except Error as error:
            self._failure = error
        finally:
            if worker >= 0:
                self.server.forget_worker(worker)
            if other_server >= 0:
                self.server.forget_server(other_server)
            comm.close()

    def _answer_one(self, question: Message) -> Message:
        try:
            return self.server.handle(question)
        except Exception as error:  # a defect of this server: the other rank must not wait
            self._failure = error
            kind = type(error).__name__
            return failed(Error(f"server {self.server.number} failed with {kind}: {error}"))

    def abort(self, reason: str) -> None:
        """Stops to answer: ranks that wait for an answer raise an error with the reason."""
        for pair in self._pairs:
            with suppress(UsageError):  # its thread has closed it
                pair.abort(reason)

    def wait_for_workers(self) -> None:
        """Waits until all workers have left or died, also those that come meanwhile."""
        for thread in self._of_workers:
            thread.join()

    def wait(self) -> None:
        """Waits until also all servers that send copies have left or died.

        Raises:
            Exception: A question has failed for a reason that is the server's own.
        """
        self.wait_for_workers()
        for thread in self._of_servers:
            thread.join()
        if self._failure is not None:
            raise self._failure


@dataclass(frozen=True, slots=True)
class Roles:
    """Which ranks are servers, and which are workers; a rank may be both.

    Attributes:
        servers: Ranks of the servers, in the order of their numbers.
        workers: Ranks of the workers.
        copies: Holders of each key.
    """

    servers: Sequence[int]
    workers: Sequence[int]
    copies: int

    def works_with(self, rank: int, server: int) -> bool:
        """Whether one rank's worker asks the server of another rank."""
        return rank != server and rank in self.workers and server in self.servers

    def copies_to(self, rank: int, server: int) -> bool:
        """Whether one rank's server sends copies to the server of another rank."""
        several = self.copies > 1 and rank != server
        return several and rank in self.servers and server in self.servers


def pairs(
    comm: Communicator, asks: Callable[[int, int], bool]
) -> tuple[dict[int, Communicator], dict[int, Communicator]]:
    """Communicators of two ranks: those on which this rank asks, and on which it answers, by rank.

    Collective.

    Args:
        comm: The ranks.
        asks: Whether one rank asks another one; the same on all ranks.

    Cost: at most two splits for each other rank.
    """
    asking: dict[int, Communicator] = {}
    answering: dict[int, Communicator] = {}
    for mates in rounds(comm.size):
        for of_lower in (True, False):  # whether the lower rank of a pair asks
            needed = {
                low
                for low, high in mates.items()
                if low < high and asks(*((low, high) if of_lower else (high, low)))
            }
            if not needed:
                continue
            mate = mates.get(comm.rank, comm.rank)
            low = min(mate, comm.rank)
            is_mine = mate != comm.rank and low in needed
            pair = comm.split(low if is_mine else -1)
            if pair is not None:
                i_ask = (comm.rank == low) == of_lower
                (asking if i_ask else answering)[mate] = pair
    return asking, answering


def rounds(n: int) -> Iterator[dict[int, int]]:
    """Rounds in which each rank meets another one, so that all meet: the circle method."""
    size = n + n % 2
    for turn in range(size - 1):
        ring = [0] + [(i + turn) % (size - 1) + 1 for i in range(size - 1)]
        mates = {}
        for i in range(size // 2):
            a, b = ring[i], ring[-1 - i]
            if a < n and b < n:
                mates[a], mates[b] = b, a
        yield mates


def links_of(
    asking: Mapping[int, Communicator],
    roles: Roles,
    rank: int,
    server: Server | None,
    ledger: Ledger,
) -> dict[int, Link]:
    """Links of a rank to the servers, by their numbers; a call to a `server` of its own."""
    links: dict[int, Link] = {}
    for number, of_rank in enumerate(roles.servers):
        if of_rank in asking:
            links[number] = RemoteLink(asking[of_rank], ledger)
        elif of_rank == rank and server is not None:
            links[number] = LocalLink(server)
    return links


__all__ = ["Answering", "LocalLink", "Roles", "links_of", "pairs", "rounds"]
