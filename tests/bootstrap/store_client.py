"""A client of the store that speaks its protocol by hand, correctly or not."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

HELLO, SET, GET, ADD, OK, ERROR, REFUSED, TAKEN, CHALLENGE, PROOF, LEAVE, GONE = range(12)
MAGIC = b"pycoll store 2"


def text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def frame(kind: int, payload: bytes, number: int = 1) -> bytes:
    return text(struct.pack("<BI", kind, number) + payload)


def read(s: socket.socket, nbytes: int) -> bytes:
    """So many bytes; fewer if the other end closes the connection."""
    got = b""
    while len(got) < nbytes:
        try:
            part = s.recv(nbytes - len(got))
        except ConnectionResetError:
            break
        if not part:
            break
        got += part
    return got


def read_frame(s: socket.socket) -> tuple[int, bytes] | None:
    """Kind and first text of a frame; None if the other end closes the connection."""
    head = read(s, 4)
    if len(head) < 4:
        return None
    body = read(s, struct.unpack("<I", head)[0])
    (nbytes,) = struct.unpack_from("<I", body, 5)
    return body[0], body[9 : 9 + nbytes]


def read_raw_frame(s: socket.socket) -> tuple[int, int, bytes]:
    """Kind, request number and payload of a frame."""
    body = read(s, struct.unpack("<I", read(s, 4))[0])
    return *struct.unpack_from("<BI", body), body[5:]


def hello(rank: int, number: bytes) -> bytes:
    return frame(HELLO, text(MAGIC) + struct.pack("<i", rank) + text(number))


def proof(token: str, role: bytes, rank: int, client: bytes, server: bytes) -> bytes:
    key = hmac.new(token.encode(), b"pycoll store", hashlib.sha256).digest()
    said = text(role) + struct.pack("<ii", rank, 0) + text(client) + text(server)
    return hmac.new(key, said, hashlib.sha256).digest()


def join(s: socket.socket, token: str, rank: int) -> int | None:
    """Joins as a rank. Returns the kind of the server's last answer."""
    number = os.urandom(16)
    s.sendall(hello(rank, number))
    challenge = read_frame(s)
    assert challenge is not None and challenge[0] == CHALLENGE
    own = proof(token, b"connect", rank, number, challenge[1])
    s.sendall(frame(PROOF, text(own), 2))
    answer = read_frame(s)
    if answer is not None and answer[0] == OK:
        assert answer[1] == proof(token, b"accept", rank, number, challenge[1])
    return None if answer is None else answer[0]
