"""One rank of one library under test: waits for its turn, then times calls of a collective.

jobs.py starts it inside the library's own environment. Between turns it sleeps in a read of its
control connection: an idle library costs nothing.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import sys
import types
from itertools import repeat
from pathlib import Path
from typing import Any

if importlib.util.find_spec("pycoll") is None:
    # A peer's environment. pycoll.bench needs NumPy alone, and the package around it is not run.
    sys.modules["pycoll"] = package = types.ModuleType("pycoll")
    package.__path__ = [str(Path(__file__).parents[1] / "pycoll")]
from pycoll.bench.adapters import ADAPTERS, Prepared, Unsupported
from pycoll.bench.case import Case
from pycoll.bench.timing import time_block


def pin(rank: int) -> None:
    """Pins this thread to one core; ranks are dealt to cores in turn."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class Rank:
    """A rank and the message that it is prepared for."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.case: Case | None = None
        self.prepared: Prepared | None = None

    def prepare(self, case: Case) -> None:
        """Makes the buffers; those of the last message are freed first."""
        self.case = self.prepared = None
        self.prepared = self.library.prepare(case)
        self.case = case

    def check(self) -> str | None:
        """Compares one call with the exact result; returns the error, or None."""
        assert self.case is not None and self.prepared is not None
        self.prepared.run(self.case, self.library.rank)
        return self.case.why_wrong(self.library.rank, self.prepared.got)

    def time_blocks(self, warmup: int, num_calls: int, num_blocks: int) -> list[float]:
        """Seconds of each block, on this rank."""
        assert self.case is not None and self.prepared is not None
        call = self.prepared.timed(self.case)
        for _ in repeat(None, warmup):
            call()
        times_s = []
        for _ in repeat(None, num_blocks):
            self.library.barrier()
            times_s.append(time_block(call, num_calls))
        return times_s

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "prepare":
            try:
                self.prepare(Case(**request["case"]))
            except Unsupported as reason:
                return {"unsupported": str(reason)}
            return {}
        if request["do"] == "check":
            return {"wrong": self.check()}
        plan = request["warmup"], request["num_calls"], request["num_blocks"]
        return {"times_s": self.time_blocks(*plan)}


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
        stream.read()  # until the driver has read it, and closes
        return
    gc.disable()
    serve(Rank(library), stream)


if __name__ == "__main__":
    main()
