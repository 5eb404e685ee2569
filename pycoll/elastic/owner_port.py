"""A port that each rank keeps open, so that it can be reached when the communicator is broken.

Every rank of a world of processes listens on its port from the start and publishes the address. So
if the kernel accepts a connection, the process is alive, and if it refuses the connection, the
process has ended, whatever the rank is doing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pycoll import _core, environment
from pycoll.arguments import shown
from pycoll.elastic.messages import BROKEN, checked_text, whole
from pycoll.elastic.port_server import PortServer
from pycoll.errors import PeerDiedError, SystemError, UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_BACKLOG = 4096  # the kernel's limit, net.core.somaxconn, may be lower
_LOOPBACK = "127.0.0.1"
_ATTEMPTS = 16  # to find a port that is free at all addresses
_MAX_HOSTS = 256  # addresses of one rank


@dataclass(frozen=True)
class Address:
    """Address of one rank: its port, at any of these hosts."""

    hosts: tuple[str, ...]
    port: int

    def to_text(self) -> str:
        return json.dumps([self.hosts, self.port])

    @classmethod
    def of_rank(cls, rank: int, text: bytes) -> Address:
        """Reads what a rank has sent. Raises UsageError that names the rank."""
        try:
            hosts, port = json.loads(text)
            if not isinstance(hosts, list) or not 0 < len(hosts) <= _MAX_HOSTS:
                raise ValueError(f"expected 1 to {_MAX_HOSTS} hosts")
            return cls(tuple(map(checked_text, hosts)), whole(port, 1 << 16))
        except BROKEN as error:
            raise UsageError(f"rank {rank} sent an invalid address of its port: {error}") from None


@dataclass(frozen=True)
class Quorum:
    """Ranks of a world of which a majority must be in the next one.

    Attributes:
        size: Number of ranks of that world.
        ranks: Ranks in that world, by rank in the world that agrees.
        ended: Ranks in that world that have ended, besides those that the agreement finds.
    """

    size: int
    ranks: Sequence[int]
    ended: frozenset[int] = frozenset()

    @classmethod
    def of_world(cls, size: int) -> Quorum:
        return cls(size, range(size))

    def among(self, ranks: Sequence[int], ended: Iterable[int]) -> Quorum:
        """The same for an agreement among some of the ranks, some others of which have ended."""
        more = frozenset(self.ranks[rank] for rank in ended)
        return Quorum(self.size, [self.ranks[rank] for rank in ranks], self.ended | more)

    def is_met(self, members: Iterable[int], ended: Iterable[int]) -> bool:
        """Whether these ranks can be sure that no other ranks of that world form a world."""
        votes = {self.ranks[rank] for rank in members}
        dead = self.ended | {self.ranks[rank] for rank in ended}
        alive = sorted(set(range(self.size)) - (dead - votes))
        twice = 2 * len(votes)
        return twice > len(alive) or (twice == len(alive) and alive[0] in votes)


@dataclass
class OwnerPort:
    """This rank's port in its world.

    Attributes:
        rank: This rank.
        addresses: Addresses of all ranks, by rank.
        secret: Secret of the ranks of this world.
        server: Server of this rank's port.
        origin: Ranks in the communicator that the port was opened for, by rank.
        quorums: What the next agreement needs. Its world has one; worlds before have one, too,
            until the world has been joined by all its ranks: others may still agree there.
        num_agreements: Calls of `agree`.
    """

    rank: int
    addresses: list[Address]
    secret: bytes
    server: PortServer
    origin: list[int]
    quorums: list[Quorum]
    num_agreements: int = 0

    @property
    def own(self) -> Address:
        return self.addresses[self.rank]

    @property
    def size(self) -> int:
        return len(self.addresses)

    def proof(self, who: str, rank: int, nonces: bytes) -> str:
        """Proof that rank `rank` of this world answers these fresh random numbers."""
        text = f"pycoll port {who} {rank} ".encode() + nonces
        return hmac.new(self.secret, text, hashlib.sha256).hexdigest()

    def of_members(self, ranks: Sequence[int], ended: Sequence[int], name: str) -> OwnerPort:
        """The same port in a new world of some of the ranks, this one among them; serves there."""
        port = OwnerPort(
            ranks.index(self.rank),
            [self.addresses[rank] for rank in ranks],
            _secret(self.secret.hex(), name),
            self.server,
            [self.origin[rank] for rank in ranks],
            [*(one.among(ranks, ended) for one in self.quorums), Quorum.of_world(len(ranks))],
        )
        self.server.serve(port.rank, port.size, port.proof)
        return port

    def joined(self) -> OwnerPort:
        """The port once all ranks have joined the world, in the communicator of that world."""
        ranks = list(range(self.size))
        return replace(self, origin=ranks, quorums=[Quorum.of_world(self.size)])


def _secret(token: str, name: str) -> bytes:
    """Secret of the ranks of the world with this name."""
    return hmac.new(token.encode(), f"pycoll port {name}".encode(), hashlib.sha256).digest()


def open_owner_port(
    exchange: Callable[[str, str, float], list[bytes]],
    rank: int,
    size: int,
    one_host: bool,
    name: str,
    token: str,
    timeout_s: float,
    former: Sequence[OwnerPort] = (),
) -> OwnerPort:
    """Opens this rank's port and exchanges addresses. Collective over the world's ranks.

    Args:
        exchange: Function of a topic, this rank's text and a timeout; returns all ranks' texts.
        rank: This rank.
        size: Number of ranks.
        one_host: All ranks are on this host, so other hosts need not reach the port.
        name: The world's name, unique among all worlds.
        token: The session's token.
        timeout_s: Seconds in which the other ranks must take part.
        former: Owner ports in earlier worlds; one of their ports is reused if possible.

    Raises:
        SystemError: No port can be opened; the message names PYCOLL_PORTS.
        TimeoutError: A rank did not take part before the deadline.
    """
    filter = environment.read("PYCOLL_IFNAME")
    hosts = [_LOOPBACK] if one_host else _core.bootstrap.interface_addresses(filter)
    kept = [port for port in former if port.own.hosts == tuple(hosts)]
    if kept:
        own, server = kept[-1].own, kept[-1].server
    else:
        listeners = _listen(hosts)
        server = PortServer(list(listeners.values()))
        own = Address(tuple(listeners), server.port)
    try:
        texts = exchange("port", own.to_text(), timeout_s)
        addresses = [Address.of_rank(peer, text) for peer, text in enumerate(texts)]
        secret, ranks = _secret(token, name), list(range(size))
        port = OwnerPort(rank, addresses, secret, server, ranks, [Quorum.of_world(size)])
        server.serve(rank, size, port.proof)
    except BaseException:
        if not kept:
            server.close()
        raise
    return port


def owner_port_of(comm: Communicator, method: str) -> OwnerPort:
    """This rank's port in the communicator's world.

    Raises:
        UsageError: It has none, and `method` needs one.
    """
    if comm._owner_ports and comm.size > 1:
        return comm._owner_ports[-1]
    raise UsageError(
        f"{method}: expected a communicator of several processes made by pycoll.init, join, shrink "
        "or grow, which has not been replaced; split the new one again"
    )


def exchange_through(store: Any, rank: int, size: int) -> Callable[[str, str, float], list[bytes]]:
    """Exchange function for `open_owner_port`, through a store that the ranks share.

    If a rank ends meanwhile, it raises PeerDiedError on all other ranks or on none of them: on none
    once rank 0 has set all ranks' texts.
    """

    def exchange(topic: str, own: str, timeout_s: float) -> list[bytes]:
        store.set(f"{topic}/{rank}", own)
        # One rank collects, so that n ranks make 2n requests, not n * n.
        if rank == 0:
            texts = [store.get(f"{topic}/{r}", timeout_s).decode() for r in range(size)]
            store.set(f"{topic}s", json.dumps(texts))
            with contextlib.suppress(PeerDiedError):
                for peer in range(1, size):
                    store.get(f"{topic}/known/{peer}", timeout_s)
        else:
            texts = json.loads(store.get(f"{topic}s", timeout_s))
            with contextlib.suppress(PeerDiedError):
                store.set(f"{topic}/known/{rank}", "")
        return [text.encode() for text in texts]

    return exchange


def _ports() -> Sequence[int]:
    """Ports of PYCOLL_PORTS; if it is not set, the system chooses, several times if needed."""
    first, _, last = environment.read("PYCOLL_PORTS").partition("-")
    return range(int(first), int(last) + 1) if first else [0] * _ATTEMPTS


def _listen(hosts: Sequence[str]) -> dict[str, socket.socket]:
    """Listens at these addresses, at all of them on the same port; returns the sockets by address.

    An address that has gone, or is not ready yet, is left out.
    """
    why: OSError | None = None
    for port in _ports():
        listeners: dict[str, socket.socket] = {}
        try:
            for host in hosts:
                try:
                    listener = _listen_at(host, port)
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    why = error
                    continue
                listeners[host] = listener
                port = listener.getsockname()[1]
        except OSError as error:
            why = error
            for listener in listeners.values():
                listener.close()
            continue
        if listeners:
            return listeners
    where = ", ".join(hosts)
    raise SystemError(f"cannot listen on any port of {where} (set PYCOLL_PORTS): {why}")


def _listen_at(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def free_address(host: str) -> str:
    """Returns "host:port" where no process listens now, with a port of PYCOLL_PORTS.

    Raises:
        SystemError: `host` is no address of this machine, or all ports are taken.
    """
    listener = _listen([host])[host]
    port = listener.getsockname()[1]
    listener.close()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Splits "host:port"; the host of an IPv6 address may stand in brackets."""
    pattern = r"\[?([^\]]+?)\]?:(\d{1,5})"
    found = re.fullmatch(pattern, address) if isinstance(address, str) else None
    if not found or not 0 < int(found[2]) < 1 << 16:
        raise UsageError(f"address is {shown(address)}, expected 'host:port', as '10.0.0.1:29600'")
    return found[1], int(found[2])
