"""Questions and answers between workers and servers: a header of 112 bytes, and a body of bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pycoll import errors
from pycoll.communicator import Communicator
from pycoll.parallel.core import structures
from pycoll.parallel.core.ledger import Ledger

AXIS = "ps"  # of the ledger's entries
MOST_BYTES = 1 << 40  # of a body
ALL_ROWS, CACHED = -1, -2  # values of `count`
HOLD, DROP = -1.0, -2.0  # values of `factor`


class Kind(enum.IntEnum):
    """What a message asks, or answers."""

    HELLO = 1  # a worker comes; body: JSON
    REGISTER = 2  # a table; body: JSON
    INIT = 3  # first values of all rows that the server has
    PULL = 4
    PUSH = 5
    CLOCK = 6
    STEP = 7  # which step the server is at
    LEAVE = 8
    REPORT = 9  # answer: JSON
    COPY = 10  # to a holder of a copy: a push, and what has been decided on it
    APPLY = 11  # to a holder of a copy: step by the pushes that are held
    ANSWER = 12
    FAILED = 13  # answer: an error; body: its text
    UNKNOWN_KEYS = 14  # answer: the digest is not known any more, send the keys
    RESTORE = 15  # to a new holder of a copy: the whole shard
    TAKE_STATE = 16  # answer: the state of the optimizers of the parts that the server decides on
    PUT_STATE = 17  # first state of the optimizers of all parts that the server has


_FIELDS = (
    *("kind", "table", "part", "worker", "clock", "number"),
    *("dead", "count", "digest", "codec", "nbytes"),
)
_FLOATS = ("weight", "rate", "factor")
_HEADER = np.dtype([*((name, "<i8") for name in _FIELDS), *((name, "<f8") for name in _FLOATS)])
HEADER_BYTES = _HEADER.itemsize


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class Message:
    """A question or an answer.

    Attributes:
        kind: What it is.
        table: Number of the table.
        part: Number of the part, between servers; in a FAILED, the class of the error.
        worker: Number of the worker.
        clock: The worker's clock; in an answer, the server's version.
        number: Number of a push among those of the worker.
        dead: The servers that the sender knows to be dead, as bits.
        count: Number of rows whose keys are in the body; ALL_ROWS, or CACHED.
        digest: Of the keys, if they are cached.
        codec: How the values are written: a number of `filters.CODECS`.
        weight: Weight of a gradient in the mean of a step.
        rate: Learning rate; NaN: the server's own.
        factor: Of the learning rate, in a COPY; or HOLD or DROP.
        body: Keys, int64, then values; uint8.
    """

    kind: Kind
    table: int = 0
    part: int = 0
    worker: int = -1
    clock: int = 0
    number: int = 0
    dead: int = 0
    count: int = ALL_ROWS
    digest: int = 0
    codec: int = 0
    weight: float = 1.0
    rate: float = float("nan")
    factor: float = 1.0
    body: Tensor = field(default_factory=_empty)

    @property
    def nbytes(self) -> int:
        """Bytes of header and body."""
        return HEADER_BYTES + self.body.numel()

    def header(self) -> np.ndarray:
        """The header, [HEADER_BYTES] uint8."""
        made = np.zeros(1, _HEADER)
        for name in _HEADER.names or ():
            made[name] = self.body.numel() if name == "nbytes" else getattr(self, name)
        return made.view(np.uint8)

    @classmethod
    def from_header(cls, header: np.ndarray, sender: str) -> Message:
        """The message of a header, with a body of its size.

        Raises:
            Error: There is no such message.
        """
        row = header.view(_HEADER)[0]
        values: dict[str, Any] = {name: row[name].item() for name in _HEADER.names or ()}
        kind, nbytes = values.pop("kind"), values.pop("nbytes")
        if kind not in Kind.__members__.values() or not 0 <= nbytes <= MOST_BYTES:
            raise errors.Error(
                f"parameter server: {sender} sent a message of kind {kind} and {nbytes} bytes, "
                "which does not exist: run the same version of pycoll on all ranks"
            )
        return cls(Kind(kind), body=torch.empty(nbytes, dtype=torch.uint8), **values)


_ERRORS = (errors.Error, errors.UsageError, errors.TimeoutError, errors.PeerDiedError)


def failed(error: Exception) -> Message:
    """The answer that raises an error at the rank that asked."""
    classes = [i for i, kind in enumerate(_ERRORS) if isinstance(error, kind)]
    return Message(Kind.FAILED, part=max(classes, default=0), body=text_body(str(error)))


def raise_failure(answer: Message) -> None:
    """Raises the error of a FAILED answer."""
    if answer.kind == Kind.FAILED:
        kind = _ERRORS[answer.part if answer.part in range(len(_ERRORS)) else 0]
        raise kind(answer.body.numpy().tobytes().decode(errors="replace"))


def text_body(text: str) -> Tensor:
    """A text as a body."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else _empty()


def json_body(value: Any) -> Tensor:
    """A structure of plain values as a body."""
    return torch.frombuffer(bytearray(structures.encode(value, _no_leaf)), dtype=torch.uint8)


def json_of(message: Message, sender: str) -> Any:
    """The structure that a body has.

    Raises:
        Error: The body is no such structure.
    """
    return structures.decode(message.body.numpy().tobytes(), _no_such_leaf, sender)


def _no_leaf(value: Any) -> None:
    return None


def _no_such_leaf(kind: str, content: Any) -> Any:
    raise ValueError(f"unknown kind {kind!r}")


class Link(Protocol):
    """The way from a rank that asks to a server. A question is answered before the next one."""

    def send(self, message: Message) -> None:
        """Sends a question."""

    def receive(self) -> Message:
        """Waits for its answer.

        Raises:
            PeerDiedError: The server has ended.
            TimeoutError: It did not answer before the deadline.
        """

    def close(self) -> None:
        """Ends the link."""


class RemoteLink:
    """A link to a server of another rank: a communicator of two ranks.

    The end of one rank breaks its own communicators alone; all other pairs go on.
    """

    def __init__(self, comm: Communicator, ledger: Ledger) -> None:
        self.comm, self._ledger, self._peer = comm, ledger, 1 - comm.rank
        self._asked = ""

    def send(self, message: Message) -> None:
        """See Link."""
        self._asked = message.kind.name.lower()
        count(self._ledger, self._asked, message)
        send(self.comm, self._peer, message)

    def receive(self) -> Message:
        """See Link."""
        answer = receive(self.comm, self._peer)
        count(self._ledger, f"answer to {self._asked}", answer)
        return answer

    def close(self) -> None:
        """See Link."""
        self.comm.close()


def count(ledger: Ledger, name: str, message: Message) -> None:
    """Counts a message in a ledger."""
    entry = ledger.of(AXIS, name)
    entry.calls += 1
    entry.nbytes += message.nbytes


def send(comm: Communicator, peer: int, message: Message) -> None:
    """Sends a message to the other rank of a pair."""
    comm.send(message.header(), peer)
    if message.body.numel():
        comm.send(message.body, peer)


def receive(comm: Communicator, peer: int) -> Message:
    """Receives a message from the other rank of a pair."""
    header = np.empty(HEADER_BYTES, np.uint8)
    comm.recv(header, peer)
    message = Message.from_header(header, f"rank {peer} of a pair")
    if message.body.numel():
        comm.recv(message.body, peer)
    return message


__all__ = [
    "ALL_ROWS",
    "AXIS",
    "CACHED",
    "DROP",
    "HEADER_BYTES",
    "HOLD",
    "Kind",
    "Link",
    "Message",
    "RemoteLink",
    "count",
    "failed",
    "json_body",
    "json_of",
    "raise_failure",
    "receive",
    "send",
]
