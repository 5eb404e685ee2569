"""Damaged messages at a rank's port for shrink, of members and of unauthenticated peers, and to it.

The port keeps serving, knows only ranks of its world, and an agreement ends as documented.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import threading
from dataclasses import replace
from typing import Any

import pycoll
from injections import Outcome
from pycoll.elastic.agreement import ShrinkAgreement
from pycoll.elastic.messages import NONCE_BYTES, Hello
from pycoll.elastic.owner_port import Address, OwnerPort, open_owner_port

CASES = 1000
FEW = range(1, 9)
SIZE = 3
_NUM_MESSAGES = 100
_WAIT_S = 5.0
_AGREE_S = 0.3

# Values that a JSON reader, or the code behind it, may trip over.
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    SIZE,
    2**63,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    0.5,
    "",
    "0",
    "zz",
    "\ud800",
    "\x1b[2J",
    "w" * 5000,
    [],
    [0],
    [0, 1, 2],
    ["1"],
    [[[]]],
    {},
    {"rank": 1},
]


def damaged(choose: random.Random, message: dict[str, Any]) -> bytes:
    """The message with values exchanged, or its bytes changed; or as it is."""
    message = dict(message)
    for _ in range(choose.randrange(3)):
        name = choose.choice([*message, "refused"])
        if choose.random() < 0.2:
            message.pop(name, None)
        else:
            message[name] = choose.choice(ODD)
    line = bytearray(json.dumps(message).encode() + b"\n")
    if choose.random() < 0.2:
        for _ in range(1 + choose.randrange(4)):
            line[choose.randrange(len(line))] = choose.randrange(256)
    if choose.random() < 0.05:
        line[:0] = choose.choice((b"[" * 60_000, b"x" * 200_000, b'{"a":' * 9_000, b"\n"))
    return bytes(line)


def talk(choose: random.Random, port: OwnerPort) -> None:
    """Sends a damaged hello to the port, with a right proof or a wrong one."""
    with socket.create_connection(("127.0.0.1", port.own.port), timeout=_WAIT_S) as s:
        file = s.makefile("rb")
        rank, own = choose.choice((1, 2, 7)), secrets.token_bytes(NONCE_BYTES)
        nonces = bytes.fromhex(json.loads(file.readline())["nonce"]) + own
        known = choose.random() < 0.8
        proof = port.proof("follower", rank, nonces) if known else "0" * 64
        topic, value = choose.choice((("shrink", None), ("agree 1", ("min", 5))))
        proposal = choose.choice((None, {"value": 5}))
        hello = Hello(rank, own, frozenset([0]), proof, topic, value, proposal).to_message()
        with contextlib.suppress(ConnectionError):
            s.sendall(damaged(choose, hello))
            if choose.random() < 0.3:
                s.sendall(choose.randbytes(choose.choice((1, 10, 100_000))))


def answer_badly(choose: random.Random, listener: socket.socket, port: OwnerPort) -> None:
    """Plays rank 0, as a member whose messages are damaged, until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as s, contextlib.suppress(ValueError, OSError):
                s.settimeout(_WAIT_S)
                own, file = secrets.token_bytes(NONCE_BYTES), s.makefile("rb")
                nonce = {"nonce": own.hex()}
                s.sendall(damaged(choose, nonce) if choose.random() < 0.3 else _line(nonce))
                nonces = own + bytes.fromhex(json.loads(file.readline())["nonce"])
                proof = {"proof": port.proof("coordinator", 0, nonces)}
                s.sendall(damaged(choose, proof) if choose.random() < 0.3 else _line(proof))
                verdict = {
                    "ranks": [0, 1],
                    "ended": [],
                    "name": "w",
                    "host": "127.0.0.1",
                    "port": 1,
                }
                s.sendall(damaged(choose, verdict))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def check_agreement(choose: random.Random, port: OwnerPort) -> str:
    """What is wrong with an agreement whose lower rank sends damaged messages."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_badly, args=(choose, listener, port))
        thread.start()
        try:
            lower = Address(("127.0.0.1",), listener.getsockname()[1])
            own = replace(port, rank=1, addresses=[lower, port.own])
            port.server.serve(1, 2, own.proof)
            verdict = port.server.run(
                ShrinkAgreement(own, lambda host: 0, _AGREE_S, _AGREE_S).verdict()
            )
        except (pycoll.TimeoutError, pycoll.PeerDiedError):
            return ""
        except Exception as error:
            return f"an agreement raised {error!r}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    good = 1 in verdict.ranks and set(verdict.ranks) <= {0, 1} and 0 <= verdict.port < 1 << 16
    return "" if good else f"an agreement returned {verdict}"


def check_port(port: OwnerPort) -> str:
    """What is wrong with the port; empty: a rank that proves itself is still served."""

    async def known() -> tuple[set[int], set[int]]:
        topics = ("shrink", "agree 1")
        joined = {rank for topic in topics for rank in port.server.members(topic)}
        return joined, set(port.server.ended)

    joined, ended = port.server.run(known())
    if not joined | ended <= set(range(SIZE)):
        return f"the port knows ranks {joined | ended} in a world of {SIZE}"
    with socket.create_connection(("127.0.0.1", port.own.port), timeout=_WAIT_S) as s:
        file, own = s.makefile("rb"), bytes(NONCE_BYTES)
        nonces = bytes.fromhex(json.loads(file.readline())["nonce"]) + own
        proof = port.proof("follower", 1, nonces)
        s.sendall(_line(Hello(1, own, frozenset(), proof, "shrink").to_message()))
        if json.loads(file.readline()) != {"proof": port.proof("coordinator", 0, nonces)}:
            return "the port answers a rank wrongly"
    return ""


def run_case(seed: int) -> Outcome:
    choose = random.Random(seed)
    own_thrice = lambda topic, own, timeout_s: [own.encode()] * SIZE  # noqa: E731
    port = open_owner_port(own_thrice, 0, SIZE, True, "a world", "a token", _WAIT_S)
    try:
        for _ in range(_NUM_MESSAGES):
            talk(choose, port)
        complaint = check_port(port) or check_agreement(choose, port)
    except OSError as error:
        complaint = f"the port does not answer: {error!r}"
    finally:
        port.server.close()
    return Outcome(complaint, amount=_NUM_MESSAGES)
