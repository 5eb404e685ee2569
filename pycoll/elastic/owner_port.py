"""A port that each rank keeps open, so that it can be reached when the communicator is broken.

Every rank of a world of processes listens on its port from the start and publishes the address. So
if the kernel accepts a connection, the process is alive, and if it refuses the connection, the
process has ended, whatever the rank is doing.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import re
import reprlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pycoll import _core, environment
from pycoll.elastic.port_server import PortServer
from pycoll.errors import SystemError, UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_BACKLOG = 4096  # the kernel's limit, net.core.somaxconn, may be lower
_LOOPBACK = "127.0.0.1"
_ATTEMPTS = 16  # to find a port that is free at all addresses


@dataclass(frozen=True)
class Address:
    """Address of one rank: its port, at any of these hosts."""

    hosts: tuple[str, ...]
    port: int

    def to_text(self) -> str:
        return json.dumps([self.hosts, self.port])

    @classmethod
    def from_text(cls, text: str) -> Address:
        hosts, port = json.loads(text)
        return cls(tuple(hosts), port)


@dataclass
class OwnerPort:
    """This rank's port in its world.

    Attributes:
        rank: This rank.
        addresses: Addresses of all ranks, by rank.
        secret: Secret of the ranks of this world.
        server: Server of this rank's port.
        num_agreements: Calls of `agree`.
    """

    rank: int
    addresses: list[Address]
    secret: bytes
    server: PortServer
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
        texts = [text.decode() for text in exchange("port", own.to_text(), timeout_s)]
        secret = hmac.new(token.encode(), f"pycoll port {name}".encode(), hashlib.sha256).digest()
        port = OwnerPort(rank, [Address.from_text(text) for text in texts], secret, server)
        server.serve(rank, port.proof)
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
    """Exchange function for `open_owner_port`, through a store that the ranks share."""

    def exchange(topic: str, own: str, timeout_s: float) -> list[bytes]:
        store.set(f"{topic}/{rank}", own)
        # One rank collects, so that n ranks make 2n requests, not n * n.
        if rank == 0:
            texts = [store.get(f"{topic}/{r}", timeout_s).decode() for r in range(size)]
            store.set(f"{topic}s", json.dumps(texts))
            for peer in range(1, size):
                store.get(f"{topic}/known/{peer}", timeout_s)
        else:
            texts = json.loads(store.get(f"{topic}s", timeout_s))
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
    raise SystemError(f"cannot listen on any port for shrink (set PYCOLL_PORTS): {why}")


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


def host_and_port(address: str) -> tuple[str, int]:
    """Splits "host:port"; the host of an IPv6 address may stand in brackets."""
    pattern = r"\[?([^\]]+?)\]?:(\d{1,5})"
    found = re.fullmatch(pattern, address) if isinstance(address, str) else None
    if not found or not 0 < int(found[2]) < 1 << 16:
        text = reprlib.repr(address)
        raise UsageError(f"address is {text}, expected 'host:port', as '10.0.0.1:29600'")
    return found[1], int(found[2])
