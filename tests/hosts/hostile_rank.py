"""A rank of another host that joins a job as any rank does, and then sends any bytes.

It speaks the bootstrap and the frames by hand, in Python, so it needs no second host. What it sends
after it has joined is up to the test: see csrc/transport/net/wire.h and
csrc/transport/ring/mailbox.h.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from typing import Any

import pycoll
from pycoll._core import bootstrap

KINDS = ("heartbeat", "slot", "credit", "lines", "mail", "join", "left", "ask", "tell", "failure")
# kind, protocol, spare, nbytes, group, mark, call, sequence, heads, spare, word, more
HEADER = struct.Struct("<BBHIQIII2IIQQ")
FIELDS = [
    "kind",
    "protocol",
    "spare",
    "nbytes",
    "group",
    "mark",
    "call",
    "sequence",
    "head0",
    "head1",
    "spare_too",
    "word",
    "more",
]
EAGER, ANNOUNCE, TAKEN, PULL, PART = 1, 2, 3, 4, 5
U8, F32 = 10, 0


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(value)) + value


def message(
    kind: int,
    nbytes: int,
    lines: int = 1,
    tag: int = 0,
    ref: tuple[int, int, int, int] = (0, 0, 0, 0),
    dtype: int = U8,
) -> bytes:
    """A header of one line (MessageHeader). `ref`: ids of send and receive, address, offset."""
    head = struct.pack("<QQiHBB", 0, nbytes, tag, lines, kind, dtype)
    return head + struct.pack("<QQQQ", *ref) + bytes(8)


def build_record(version: str = pycoll.__version__, layout: str = bootstrap.memory_layout) -> bytes:
    """The record of csrc/bootstrap/join/build.h."""
    return text("pycoll build") + text(version) + text(layout) + text("hostile")


class _Reader:
    def __init__(self, rest: bytes) -> None:
        self.rest = rest

    def number(self, format: str) -> int:
        (value,) = struct.unpack_from("<" + format, self.rest)
        self.rest = self.rest[struct.calcsize("<" + format) :]
        return int(value)

    def text(self) -> bytes:
        size = self.number("I")
        value, self.rest = self.rest[:size], self.rest[size:]
        return value


class HostileRank:
    """The last rank of a job; all other ranks share a host. `build`: what it says of its pycoll."""

    def __init__(self, port: int, token: str, size: int = 2, build: bytes = b"") -> None:
        self.build = build or build_record()
        self.rank, self.size, self.token = size - 1, size, token
        self.store = bootstrap.TcpStore("127.0.0.1", port, token, self.rank, 20)
        self.sockets: list[socket.socket] = []  # by rank
        self._meet()
        self._connect(self._places())
        self._measure()
        for peer in range(size - 1):
            self.send("join", peer=peer)
        for peer in range(size - 1):
            while self.receive(peer)["kind"] != KINDS.index("join"):
                pass
        self._exchange("port", '[["127.0.0.1"], 1]')
        self.store.set(f"known/port/{self.rank}", b"")

    def close(self) -> None:
        for one in self.sockets:
            one.close()

    def send(self, kind: str | int, body: bytes = b"", peer: int = 0, **fields: int) -> None:
        """Sends a frame whose other fields are 0, or those given."""
        number = KINDS.index(kind) if isinstance(kind, str) else kind
        values = {"nbytes": len(body), "group": self.group, **fields, "kind": number}
        self.send_bytes(HEADER.pack(*(values.get(name, 0) for name in FIELDS)) + body, peer)

    def send_bytes(self, data: bytes, peer: int = 0) -> None:
        self.sockets[peer].sendall(data)

    def receive(self, peer: int = 0) -> dict[str, Any]:
        """The next frame of `peer`, with its payload as "body"."""
        frame = dict(zip(FIELDS, HEADER.unpack(self._read(peer, HEADER.size)), strict=True))
        return {**frame, "body": self._read(peer, frame["nbytes"])}

    def receive_lines(self, peer: int = 0) -> bytes:
        """The payload of the next frame of a mailbox."""
        while True:
            frame = self.receive(peer)
            if frame["kind"] == KINDS.index("lines"):
                return bytes(frame["body"])

    def _read(self, peer: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self.sockets[peer].recv(nbytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    # The bootstrap: what csrc/bootstrap/join and csrc/join do.

    def _exchange(self, topic: str, own: bytes | str) -> list[bytes]:
        self.store.set(f"hosts/{topic}/{self.rank}", own)
        reader = _Reader(self.store.get(f"hosts/{topic}", 20))
        return [reader.text() for _ in range(self.size)]

    def _meet(self) -> None:
        store = self.store
        assert _Reader(store.get("join/rank_zero", 20)).number("i") == self.size
        store.add(f"join/arrived/{self.rank}", 1)
        if store.add("join/num_arrived", 1) == self.size and store.add("join/num_verdicts", 1) == 1:
            store.set("join/verdict", b"\0" + text(os.urandom(16).hex()))
        reader = _Reader(store.get("join/verdict", 20))
        assert reader.number("B") == 0
        name = reader.text()
        self.name = name
        store.set(f"join/done/{self.rank}", b"")
        self.key = hmac.new(self.token.encode(), b"pycoll links " + name, hashlib.sha256).digest()
        self.group = 1469598103934665603  # FNV-1a of the name
        for byte in name:
            self.group = ((self.group ^ byte) * 1099511628211) & (2**64 - 1)

    def _places(self) -> list[tuple[str, int]]:
        """An address for each other rank."""
        self._exchange("places", self.build + text("hostile/net:1") + text("hostile") + text(b"\1"))
        offer = text("") + text("") + b"\0" + text("") + struct.pack("<i", 0)
        background, tls, trust = b"\1", b"\0", b"\0"
        said = b"pycoll offer " + self.name
        knows = hmac.new(self.token.encode(), said, hashlib.sha256).digest()
        self._exchange("offers", offer + background + tls + trust + text(knows))
        own = text("") + text(struct.pack("<I", 0))
        addresses = []
        for place in self._exchange("listeners", own)[: self.rank]:
            reader = _Reader(place)
            reader.text()
            reader = _Reader(reader.text())
            assert reader.number("I") > 0  # addresses, of which the first one will do
            addresses.append((reader.text().decode(), reader.number("i")))
        return addresses

    def _connect(self, addresses: list[tuple[str, int]]) -> None:
        for peer, address in enumerate(addresses):
            one = socket.create_connection(address, timeout=20)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets.append(one)
            own = os.urandom(16)
            one.sendall(b"pycoll 1" + struct.pack("<ii", self.rank, peer) + own)
            theirs = self._read(peer, 16)
            one.sendall(self._proof("connect", peer, own, theirs))
            assert self._read(peer, 32) == self._proof("accept", peer, own, theirs)
        for one in self.sockets:
            one.sendall(b"K")

    def _proof(self, role: str, peer: int, own: bytes, theirs: bytes) -> bytes:
        said = text(role) + struct.pack("<ii", self.rank, peer) + text(own) + text(theirs)
        return hmac.new(self.key, said, hashlib.sha256).digest()

    def _measure(self) -> None:
        """Answers rank 0, which measures the network."""
        while (frame := self.receive())["more"] != 2:
            if frame["more"] != 1:
                self.send("heartbeat", group=0)
        self._exchange("network cost", bytes(16))
