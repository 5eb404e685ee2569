"""Messages between the ports of ranks: JSON objects of one line, read with all fields checked.

A message that is not as expected raises one of BROKEN, which ends its connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_LINE = 1 << 16  # bytes of a message, and of what is buffered of a connection before it is read
NONCE_BYTES = 32
_MAX_TEXT = 4096
_MAX_TOPIC = 64
# Errors of connections and of messages that are not as expected.
BROKEN = (
    OSError,
    EOFError,
    asyncio.LimitOverrunError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,  # of JSON that is nested deeply
    OverflowError,  # of numbers such as 1e999
)


@dataclass(frozen=True)
class Hello:
    """A follower's answer to a fresh random number.

    Attributes:
        rank: Its rank.
        nonce: Its own fresh random number.
        ended: Ranks that have ended, as far as it knows.
        proof: Proof that it belongs to the world.
        topic: What it wants to agree on.
        value: What it contributes: nothing, or an op and a number.
        proposal: A decision that it proposes instead, for the reader of the topic to check.
    """

    rank: int
    nonce: bytes
    ended: frozenset[int]
    proof: str
    topic: str
    value: tuple[str, int] | None = None
    proposal: Mapping[str, Any] | None = None

    def to_message(self) -> dict[str, Any]:
        message = asdict(self)
        return message | {"nonce": self.nonce.hex(), "ended": sorted(self.ended)}

    @classmethod
    def read(cls, message: Mapping[str, Any], size: int) -> Hello:
        """Reads the hello of a rank of a world of `size` ranks."""
        proposal = message["proposal"]
        if proposal is not None and not isinstance(proposal, dict):
            raise ValueError("expected a decision")
        return cls(
            whole(message["rank"], size),
            nonce(message),
            frozenset(_ranks(message["ended"], size)),
            proof(message),
            checked_text(message["topic"], _MAX_TOPIC),
            _op_and_number(message["value"]),
            proposal,
        )


@dataclass(frozen=True)
class Verdict:
    """Members of the new world, and the address of its store.

    Attributes:
        ranks: Ranks of the old world, ascending.
        ended: Ranks of the old world that are known to have ended.
        name: Name of the new world.
        host: Host of its store.
        port: Port of its store.
    """

    ranks: list[int]
    ended: list[int]
    name: str
    host: str
    port: int

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, message: Mapping[str, Any], member: int, size: int) -> Verdict:
        """Reads the verdict on a world of `size` ranks, which `member` has helped to find."""
        ranks = _ranks(message["ranks"], size)
        if member not in ranks or ranks != sorted(set(ranks)):
            raise ValueError("no verdict on this rank")
        ended, port = _ranks(message["ended"], size), whole(message["port"], 1 << 16)
        return cls(ranks, ended, checked_text(message["name"]), checked_text(message["host"]), port)


def nonce(message: Mapping[str, Any]) -> bytes:
    value = bytes.fromhex(checked_text(message["nonce"]))
    if len(value) != NONCE_BYTES:
        raise ValueError("not a fresh random number")
    return value


def proof(message: Mapping[str, Any]) -> str:
    return checked_text(message["proof"])


def refusal(message: Mapping[str, Any]) -> str | None:
    """The coordinator's reason not to make a world; None if the message is a verdict."""
    return checked_text(message["refused"]) if "refused" in message else None


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = await reader.readuntil(b"\n")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


async def write_message(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


def whole(value: Any, end: int) -> int:
    """A number from 0 to `end` - 1."""
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"expected a whole number below {end}")
    return value


def int64(value: Any) -> int:
    """A number of 64 bits, or a bool."""
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise ValueError("expected a number of 64 bits")
    return value


def _op_and_number(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("expected an op and a number")
    return checked_text(value[0], _MAX_TOPIC), int64(value[1])


def _ranks(value: Any, size: int) -> list[int]:
    if not isinstance(value, list) or len(value) > size:
        raise ValueError(f"expected at most {size} ranks")
    return [whole(each, size) for each in value]


def checked_text(value: Any, most: int = _MAX_TEXT) -> str:
    """A text for errors and addresses, which must not control the reader's terminal."""
    if not isinstance(value, str) or len(value) > most or not value.isascii():
        raise ValueError(f"expected at most {most} characters of ASCII")
    if not value.isprintable():
        raise ValueError("expected a text without control characters")
    return value
