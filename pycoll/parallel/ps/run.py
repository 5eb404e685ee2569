"""Starts servers and workers: `with pc.ps.run(...) as w`, `pc.ps.start`, `pc.ps.join`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pycoll
from pycoll import _core, threads
from pycoll.communicator import Communicator
from pycoll.errors import Error, TimeoutError, UsageError
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.core.mesh import world
from pycoll.parallel.ps.consistency import Damping, consistency_of
from pycoll.parallel.ps.filters import Filter
from pycoll.parallel.ps.keys import MOST_SERVERS, HashRing
from pycoll.parallel.ps.messages import Kind, Link, Message, RemoteLink, json_body, json_of
from pycoll.parallel.ps.messages import raise_failure as check
from pycoll.parallel.ps.optimizers import SGD, MakeOptimizer
from pycoll.parallel.ps.roles import Answering, Roles, links_of, pairs
from pycoll.parallel.ps.server import Server
from pycoll.parallel.ps.worker import Worker

_WAIT_SHARE = 0.8  # of a worker's deadline, after which a server says for which worker it waits
_LISTEN_S = 1.0  # after which a server looks whether it has ended


@dataclass(slots=True)
class Job:
    """This rank's part in a parameter server.

    Attributes:
        worker: Its worker; None on a rank that is a server alone.
        server: Its server; None on a rank that is a worker alone.
    """

    worker: Worker | None
    server: Server | None
    _answering: Answering | None = None
    _asking: list[Communicator] = field(default_factory=list)
    _doors: list[threading.Thread] = field(default_factory=list)
    _has_ended: threading.Event = field(default_factory=threading.Event)

    def serve(self) -> None:
        """Answers until all workers have left or died; for a rank that is a server.

        Raises:
            Exception: A question failed for a reason that is the server's own.
        """
        if self._answering is None or self.server is None:
            return
        self._answering.wait_for_workers()
        self._has_ended.set()
        for door in self._doors:
            door.join()
        self.server.disconnect()
        self._answering.wait()

    def close(self) -> None:
        """Leaves as a worker; a server then answers the others until they have left."""
        if self.worker is not None:
            self.worker.close()
        self.serve()

    def abort(self, reason: str) -> None:
        """Leaves at once: ranks that wait for this one raise an error. Not collective.

        Args:
            reason: For that error.
        """
        self._has_ended.set()
        if self._answering is not None:
            self._answering.abort(reason)
        for pair in self._asking:
            if not pair.closed:
                pair.abort(reason)

    def listen(self, address: str) -> None:
        """Lets workers come later: they join a pair with this rank at an address."""
        door = threading.Thread(target=self._admit, args=(address,), daemon=True)
        self._doors.append(door)
        threads.start(door, "the thread of a parameter server that waits for workers")

    def _admit(self, address: str) -> None:
        assert self._answering is not None
        while not self._has_ended.is_set():
            alone = Communicator(_core.init_local(_core.make_local_world(1), 0, 60.0))
            with alone, suppress(TimeoutError):
                self._answering.answer_worker(alone.grow(1, address, _LISTEN_S))


def start(
    comm: Communicator,
    *,
    servers: int | Sequence[int] = 1,
    mode: str = "sync",
    staleness: int | None = None,
    k: int | None = None,
    backup: int = 0,
    copies: int = 1,
    optimizer: MakeOptimizer | Mapping[str, MakeOptimizer] | None = None,
    damping: bool = False,
    max_staleness: int | None = None,
    filters: Sequence[Filter] = (),
    colocated: bool = False,
    listen: Sequence[str] = (),
    seed: int = 0,
    ledger: Ledger | None = None,
) -> Job:
    """Gives the ranks of a communicator their roles. Collective; see `run` for the arguments."""
    roles = _roles(comm.size, servers, copies, colocated)
    consistency = consistency_of(mode, len(roles.workers), staleness=staleness, k=k, backup=backup)
    ring, rate = HashRing(len(roles.servers), copies), Damping(damping, max_staleness)
    if listen and len(listen) != len(roles.servers):
        raise UsageError(
            f"parameter server: listen has {len(listen)} addresses, expected one for each of "
            f"{len(roles.servers)} servers"
        )
    server = None
    if comm.rank in roles.servers:
        server = Server(
            roles.servers.index(comm.rank),
            ring,
            len(roles.workers),
            consistency,
            optimizer or SGD(0.01),
            damping=rate,
            seed=seed,
            timeout_s=_WAIT_SHARE * comm.timeout_s,
            settings={
                "servers": len(roles.servers),
                "copies": copies,
                "mode": mode,
                "staleness": staleness,
                "k": k,
                "backup": backup,
                "workers": len(roles.workers),
            },
        )
    to_servers, from_workers = pairs(comm, roles.works_with)
    to_copies, from_originals = pairs(comm, roles.copies_to)
    job = Job(None, server, _asking=[*to_servers.values(), *to_copies.values()])
    if server is not None:
        server.connect(links_of(to_copies, roles, comm.rank, None, server.ledger))
        job._answering = answering = Answering(server)
        for rank, pair in from_workers.items():
            answering.answer_worker(pair, roles.workers.index(rank))
        for rank, pair in from_originals.items():
            answering.answer_server(pair, roles.servers.index(rank))
        if listen:
            job.listen(listen[server.number])
    if comm.rank in roles.workers:
        counts = ledger or Ledger()
        job.worker = Worker(
            links_of(to_servers, roles, comm.rank, server, counts),
            ring,
            consistency,
            roles.workers.index(comm.rank),
            len(roles.workers),
            filters=filters,
            ledger=counts,
        )
    return job


@contextmanager
def run(*, comm: Communicator | None = None, **options: Any) -> Iterator[Worker]:
    """A parameter server on the ranks of this job: servers answer, workers run the block.

    A rank that is a server stays in this call until all workers have left or died, and then ends
    the program (as in MXNet). What comes behind the block is for workers alone.

    Args:
        comm: The ranks; None: those of `pycoll.init()`.
        servers: Number of servers, the lowest ranks; or their ranks. Keys belong to them by
            consistent hashing.
        mode: "sync": each step is the mean of all workers' gradients. "ksync": of the first `k`.
            "async": each push is an update, and no worker waits. "ssp": as "async", but no worker
            is more than `staleness` clocks ahead of the slowest.
        staleness: Clocks, for "ssp".
        k: Workers, for "ksync".
        backup: Workers of a "sync" step that need not come.
        copies: Servers that hold each key; a push is acknowledged when all have it, so the end of
            `copies - 1` servers loses nothing, and the servers that are left get new copies.
        optimizer: `pc.ps.SGD(lr)`, `Adagrad`, `Adam`, `Proximal`, or a function of a list of one
            tensor, and of whether its gradients are sparse, that returns an optimizer of torch. It
            must step each element by itself. Or a dict of such by name of the table.
        damping: Divide the learning rate of a stale gradient by 1 + its staleness.
        max_staleness: Drop gradients of a larger staleness, in updates.
        filters: What workers leave out of their messages: `pc.ps.KeyCache()`, `Significance`,
            `KKT`, `Int8Feedback`.
        colocated: All ranks are workers, those of the servers, too.
        listen: An address for each server, "host:port", at which workers may `join` later.
        seed: Seed of the tables' first values.
        ledger: Counts this worker's messages.

    Yields:
        The worker.

    Raises:
        UsageError: There is no server or no worker, or an option is out of its range.
        SystemExit: On a server, when all workers have left.

    Cost: at most four splits for each other rank; a thread of a server for each rank that asks.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI.
    """
    job = start(comm or world(), **options)
    if job.worker is None:
        job.serve()
        raise SystemExit(0)
    try:
        yield job.worker
    finally:
        job.close()


@contextmanager
def join(
    addresses: Sequence[str], *, filters: Sequence[Filter] = (), timeout_s: float = 60.0
) -> Iterator[Worker]:
    """Comes as a new worker to running servers, or comes back after an end.

    Args:
        addresses: Those of `listen`, in its order.
        filters: As for `run`.
        timeout_s: Seconds in which the servers must answer; also the deadline of later operations.

    Yields:
        The worker, with a number of its own, at the clock of the slowest one. It registers what
        the others have registered; in "sync" mode, the other workers wait for its gradients then.

    Raises:
        UsageError: There is no address, or it belongs to another job.
        TimeoutError: No server listens there.
    """
    if not addresses:
        raise UsageError("join: there are no addresses, expected one for each server")
    ledger = Ledger()
    links: dict[int, Link] = {}
    number, clock = None, None
    settings: dict[str, Any] = {}
    for server, address in enumerate(addresses):
        links[server] = link = RemoteLink(pycoll.join(address, timeout_s), ledger)
        link.send(Message(Kind.HELLO, body=json_body({"worker": number, "clock": clock})))
        answer = link.receive()
        check(answer)
        settings = json_of(answer, f"server {server}")
        number, clock = answer.worker, answer.clock
    num_servers = settings.pop("servers")
    if num_servers != len(addresses):
        raise UsageError(f"join: {len(addresses)} addresses, and there are {num_servers} servers")
    ring = HashRing(num_servers, settings.pop("copies"))
    num_workers = settings.pop("workers")
    consistency = consistency_of(settings.pop("mode"), num_workers, **settings)
    assert number is not None and clock is not None
    worker = Worker(links, ring, consistency, number, num_workers, filters=filters, ledger=ledger)
    worker.steps = clock
    try:
        yield worker
    finally:
        with suppress(Error):
            worker.close()


def _roles(size: int, servers: int | Sequence[int], copies: int, colocated: bool) -> Roles:
    ranks = list(range(servers)) if isinstance(servers, int) else [int(rank) for rank in servers]
    if not ranks:
        raise UsageError(f"parameter server: servers={servers}: expected at least one server")
    if len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= size:
        expected = "fewer servers than ranks"
        if not isinstance(servers, int):
            expected = f"different ranks from 0 to {size - 1}"
        raise UsageError(
            f"parameter server: servers={servers} on {size} ranks: expected {expected}"
        )
    workers = [rank for rank in range(size) if colocated or rank not in ranks]
    if not workers:
        raise UsageError(
            f"parameter server: {len(ranks)} servers on {size} ranks leave no worker: start more "
            "ranks, or take fewer servers or colocated=True"
        )
    if len(ranks) > MOST_SERVERS:
        raise UsageError(f"parameter server: {len(ranks)} servers, at most {MOST_SERVERS}")
    if not 1 <= copies <= len(ranks):
        raise UsageError(
            f"parameter server: copies={copies} on {len(ranks)} servers: expected 1 to {len(ranks)}"
        )
    return Roles(ranks, workers, copies)


__all__ = ["Job", "join", "run", "start"]
