"""The job as a rank sees it: its communicator, and the way back after a death."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

import pycoll
from pycoll.arguments import seconds
from pycoll.communicator import Communicator
from pycoll.elastic.owner_port import free_address
from pycoll.errors import Error, PeerDiedError, TimeoutError

_POLL_S = 0.1
_MOST_ADDRESS_BYTES = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Which actor of the world this is.

    Attributes:
        actor: Its number, which a restart does not change.
        role: Name of its role.
        num_actors: Number of actors of the world.
        restarts: Whether Ray restarts actors.
        timeout_s: Deadline of operations, seconds.
    """

    actor: int
    role: str
    num_actors: int
    restarts: bool
    timeout_s: float


class Job:
    """First argument of the functions that `World.run` calls.

    Attributes:
        actor: Number of this actor, which a restart does not change. It is the rank until a rank
            dies.
        actors: The actor of each rank of `comm`.
        role: Name of this actor's role.
        is_restarted: Whether this call of the function follows a death of the actor: what it
            computed is lost, and it begins by receiving the state of the others.
    """

    def __init__(self, comm: Communicator | None, place: Place, board: Any) -> None:
        self._comm, self._place, self._board = comm, place, board
        self.actor, self.role = place.actor, place.role
        self.actors = list(range(place.num_actors))
        self.is_restarted = comm is None

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks that are alive; `recover` replaces it.

        In a restarted process its first use waits until the other ranks call `recover`.

        Raises:
            TimeoutError: They did not within the deadline of operations.
        """
        if self._comm is None:
            self._rejoin()
        assert self._comm is not None
        return self._comm

    def addresses(self) -> list[str]:
        """An address "host:port" of each actor, for servers of the script's own.

        It was free on the node of the actor when the world began, and a restart does not change
        it: the `listen=` of a parameter server, and what a restarted worker passes to `pc.ps.join`.
        """
        found = ray.get(self._board.addresses.remote(), timeout=self._place.timeout_s)
        return [str(address) for address in found]

    def recover(self, timeout_s: float | None = None) -> Communicator:
        """Replaces `comm` after a PeerDiedError, and waits for the ranks that Ray restarts.

        Collective over the surviving ranks, as `Communicator.shrink`. Survivors keep their order,
        so rank 0 is one of them; restarted ranks follow. Where Ray does not restart actors
        (`max_restarts=0`), the new communicator has the survivors only.

        Args:
            timeout_s: Seconds in which the survivors must call, and the restarted ranks must come;
                None: the deadline of operations.

        Returns:
            `comm`, the new communicator.

        Raises:
            PeerDiedError: This rank is in a minority, as for `shrink`.
            TimeoutError: A survivor did not call, or a restarted rank did not come, before the
                deadline. In the second case `comm` has the survivors and is usable.

        Cost: as `shrink` and `grow`, and the time that Ray takes to start a process.
        """
        timeout_s = self._place.timeout_s if timeout_s is None else seconds(timeout_s)
        end_s = time.monotonic() + timeout_s
        while True:
            self._comm = self.comm.shrink(max(end_s - time.monotonic(), 1.0))
            try:
                self._learn_actors()
                missing = sorted(set(range(self._place.num_actors)) - set(self.actors))
                if missing and self._place.restarts:
                    left_s = max(end_s - time.monotonic(), 1.0)
                    self._comm = self.comm.grow(len(missing), self._invite(missing), left_s)
                    self._learn_actors()
                return self.comm
            except PeerDiedError:  # one more, meanwhile
                if time.monotonic() > end_s:
                    raise

    def abort(self, reason: str) -> None:
        """Ends the operations of all ranks, as `Communicator.abort`."""
        if self._comm is not None:
            self._comm.abort(reason)

    def _learn_actors(self) -> None:
        self.actors = self.comm.all_gather(np.array([self.actor])).reshape(-1).tolist()

    def _invite(self, missing: list[int]) -> str:
        """Rank 0 chooses an address and leaves it for the restarted ranks; returns it on all."""
        text = np.zeros(_MOST_ADDRESS_BYTES, np.uint8)
        if self.comm.rank == 0:
            address = free_address(ray.util.get_node_ip_address())
            text[: len(address)] = np.frombuffer(address.encode(), np.uint8)
            ray.get(self._board.invite.remote(missing, address), timeout=self._place.timeout_s)
        return self.comm.broadcast(text, root=0).tobytes().rstrip(b"\0").decode()

    def _rejoin(self) -> None:
        """Returns this restarted rank to the world, whose ranks call `recover`."""
        end_s = time.monotonic() + self._place.timeout_s
        last: Error | None = None
        while self._comm is None:
            if (left_s := end_s - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"actor {self.actor} was restarted and waited {self._place.timeout_s:g} s to "
                    "join the other ranks again: they call job.recover() after a PeerDiedError"
                ) from last
            address = ray.get(self._board.take.remote(self.actor), timeout=left_s)
            if address is None:
                time.sleep(_POLL_S)
                continue
            try:
                self._comm = pycoll.join(address, left_s)
            except Error as error:  # a survivor died meanwhile: the others invite again
                last = error
        self._comm.timeout_s = self._place.timeout_s
        try:
            self._learn_actors()
        except PeerDiedError:
            self.recover()


__all__ = ["Job", "Place"]
