"""One rank of one library under test: waits for its turn, then times calls of a collective.

jobs.py starts it inside the library's own environment. Between turns it sleeps in a read of its
control connection: an idle library costs nothing.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # `python -I` leaves it out.
from adapters import ADAPTERS, Call, Unsupported
from oracle import Message, encode, wrong_elements


def pin(rank: int) -> None:
    """Pins this thread to one core; ranks are dealt to cores in turn."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def time_blocks(call: Call, warmup: int, samples: int, block: int) -> list[int]:
    """Runs warmup calls, then times samples blocks of block calls each; returns ns per block."""
    clock = time.perf_counter_ns
    block_ns = []
    for _ in range(warmup):
        call()
    for _ in range(samples):
        start_ns = clock()
        for _ in repeat(None, block):
            call()
        block_ns.append(clock() - start_ns)
    return block_ns


class Rank:
    """A rank and the message that it is prepared for."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.message: Message | None = None
        self.prepared: Any = None

    def prepare(self, collective: str, dtype: str, nbytes: int) -> None:
        """Makes the buffers; those of the last message are freed first."""
        self.message = self.prepared = None
        message = Message(collective, dtype, self.library.size, nbytes)
        self.prepared = self.library.prepare(message)
        self.message = message

    def check(self) -> str | None:
        """Compares one call with the exact result; returns what is wrong, or None."""
        call, given, got = self.prepared
        given[:] = encode(self.message.values(self.library.rank), self.message.dtype)
        call()
        wrong = wrong_elements(got, self.message, self.library.rank)
        given[:] = 0  # In-place sums of anything else would grow to infinity.
        return wrong

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "prepare":
            try:
                self.prepare(request["collective"], request["dtype"], request["nbytes"])
            except Unsupported as reason:
                return {"unsupported": str(reason)}
            return {}
        if request["do"] == "check":
            return {"wrong": self.check()}
        plan = request["warmup"], request["samples"], request["block"]
        return {"block_ns": time_blocks(self.prepared[0], *plan)}


def serve(rank: Rank, stream: Any) -> None:
    """Answers one JSON line per request until the driver closes the connection."""
    for line in stream:
        stream.write(json.dumps(rank.answer(json.loads(line))) + "\n")
        stream.flush()


def main() -> None:
    adapter, address, pinned = sys.argv[1:4]
    control = socket.socket(socket.AF_UNIX)
    control.connect("\0" + address)
    stream = control.makefile("rw", encoding="utf-8")
    hello: dict[str, Any]
    try:
        library = ADAPTERS[adapter]()
    except Unsupported as reason:
        hello = {"unsupported": str(reason)}
    else:
        hello = {"rank": library.rank, "pid": os.getpid(), "version": library.version,
                 "versions": library.versions}  # fmt: skip
        if pinned == "pin":
            pin(library.rank)
    stream.write(json.dumps(hello) + "\n")
    stream.flush()
    if "unsupported" in hello:
        stream.read()  # Until the driver has heard it, and closes.
        return
    gc.disable()
    serve(Rank(library), stream)


if __name__ == "__main__":
    main()
