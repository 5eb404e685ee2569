"""Servers and workers in one process: links are calls, and servers die when a test says so."""

from __future__ import annotations

from pycoll import PeerDiedError
from pycoll import parallel as pc
from pycoll.parallel.ps.consistency import Damping, consistency_of
from pycoll.parallel.ps.keys import HashRing
from pycoll.parallel.ps.roles import LocalLink
from pycoll.parallel.ps.server import Server
from pycoll.parallel.ps.worker import Worker


class MortalLink(LocalLink):
    """A link to a server that a test can kill, before or behind its work on a question."""

    def __init__(self, world: World, server: Server) -> None:
        super().__init__(server)
        self._world, self._number = world, server.number

    def send(self, message):
        if self._number in self._world.dead:
            raise PeerDiedError(f"server {self._number} is dead", self._number)
        super().send(message)
        if (self._number, message.kind) == self._world.dies_after:
            self._world.kill(self._number)

    def receive(self):
        if self._number in self._world.dead:
            raise PeerDiedError(f"server {self._number} is dead", self._number)
        return super().receive()


class World:
    """Servers and workers whose links are calls."""

    def __init__(
        self,
        num_servers,
        num_workers,
        mode="async",
        *,
        optimizer=None,
        copies=1,
        filters=lambda: (),
        damping=None,
        timeout_s=5.0,
        **options,
    ):
        consistency = consistency_of(mode, num_workers, **options)
        ring = HashRing(num_servers, copies)
        make = optimizer or pc.ps.SGD(0.1)
        self.dead, self.dies_after = set(), None
        self.servers = [
            Server(
                i,
                ring,
                num_workers,
                consistency,
                make,
                damping=damping or Damping(),
                timeout_s=timeout_s,
            )
            for i in range(num_servers)
        ]
        for server in self.servers:
            others = [other for other in self.servers if other is not server]
            server.connect({other.number: MortalLink(self, other) for other in others})
        self.workers = [
            Worker(
                {server.number: MortalLink(self, server) for server in self.servers},
                ring,
                consistency,
                number,
                num_workers,
                filters=filters(),
            )
            for number in range(num_workers)
        ]

    def kill(self, number):
        """No link reaches the server any more, and the other servers hear of it."""
        self.dead.add(number)
        for server in self.servers:
            if server.number not in self.dead:
                server.forget_server(number)
