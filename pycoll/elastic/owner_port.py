"""A port that each rank keeps open, so that it can be reached when the communicator is broken.

Every rank of a world of processes listens on its port from the start and publishes the address, but
accepts no peer until it takes part in `shrink`. So if the kernel accepts a connection, the process
is alive, and if it refuses the connection, the process has ended, whatever the rank is doing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pycoll import _core, environment
from pycoll.errors import SystemError, UsageError

_BACKLOG = 128
_LOOPBACK = "127.0.0.1"
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


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
        socket: Listening socket of this rank.
    """

    rank: int
    addresses: list[Address]
    secret: bytes
    socket: socket.socket

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
    kept = [port.socket for port in former if port.own.hosts == tuple(hosts)]
    listener = kept[-1] if kept else _listen(hosts)
    own = Address(tuple(hosts), listener.getsockname()[1])
    texts = [text.decode() for text in exchange("port", own.to_text(), timeout_s)]
    secret = hmac.new(token.encode(), f"pycoll port {name}".encode(), hashlib.sha256).digest()
    return OwnerPort(rank, [Address.from_text(text) for text in texts], secret, listener)


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
    """Ports of PYCOLL_PORTS; [0], the system's choice, if it is not set."""
    first, _, last = environment.read("PYCOLL_PORTS").partition("-")
    return range(int(first), int(last) + 1) if first else [0]


def _listen(hosts: Sequence[str]) -> socket.socket:
    """Listens at the given address if there is one, or at all addresses of this host."""
    if len(hosts) == 1:
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        places = [(family, hosts[0], port) for port in _ports()]
    else:
        # An IPv6 socket accepts IPv4 too, if the host has it.
        places = [(socket.AF_INET6, "::", port) for port in _ports()]
        places += [(socket.AF_INET, "0.0.0.0", port) for port in _ports()]
    why: OSError | None = None
    for family, host, port in places:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            why = error
            continue
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            why = error
            listener.close()
            continue
        listener.setblocking(False)
        _open_sockets.add(listener)
        return listener
    raise SystemError(f"cannot listen on any port for shrink (set PYCOLL_PORTS): {why}")


def host_and_port(address: str) -> tuple[str, int]:
    """Splits "host:port"; the host of an IPv6 address may stand in brackets."""
    found = re.fullmatch(r"\[?([^\]]+?)\]?:(\d+)", address)
    if not found or not 0 < int(found[2]) < 1 << 16:
        raise UsageError(f"address is {address!r}, expected 'host:port', as '10.0.0.1:29600'")
    return found[1], int(found[2])


def _leave_to_parent() -> None:
    """Closes the port in a forked process, which would keep it open after the rank's death."""
    for listener in list(_open_sockets):
        with contextlib.suppress(OSError):
            listener.close()


os.register_at_fork(after_in_child=_leave_to_parent)
