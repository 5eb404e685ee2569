"""One rank of one library under test: waits for its turn, then times all_reduce calls.

jobs.py starts it inside the library's own environment, so it imports nothing but NumPy and that
library. Between turns it sleeps in a read of its control connection: an idle library costs nothing.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

Call = Callable[[], object]
PATTERN_PERIOD = 61  # A prime, so that a chunk in the wrong place cannot look right.


class Mpi:
    """MPI through mpi4py: Allreduce from one NumPy array into another."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = MPI.Get_library_version().split("\n")[0].strip(" \0")
        self.versions = {"mpi4py": mpi4py.__version__, "numpy": np.__version__}

    def prepare(self, values: np.ndarray) -> tuple[Call, np.ndarray]:
        out = np.empty_like(values)
        return partial(self.comm.Allreduce, values, out), out


class Gloo:
    """gloo through torch.distributed: all_reduce of a CPU tensor, in place (it has no other)."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.version = f"gloo of torch {torch.__version__}"
        self.versions = {"torch": torch.__version__, "numpy": np.__version__}

    def prepare(self, values: np.ndarray) -> tuple[Call, np.ndarray]:
        tensor = self.torch.from_numpy(values)
        return partial(self.dist.all_reduce, tensor), values


class Pycoll:
    """pycoll through its public interface: all_reduce from one NumPy array into another."""

    def __init__(self) -> None:
        import pycoll

        self.comm = pycoll.init()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = f"pycoll {pycoll.__version__}"
        self.versions = {"pycoll": pycoll.__version__, "numpy": np.__version__}

    def prepare(self, values: np.ndarray) -> tuple[Call, np.ndarray]:
        out = np.empty_like(values)
        return partial(self.comm.all_reduce, values, "sum", out=out), out


ADAPTERS: dict[str, Callable[[], Any]] = {"mpi": Mpi, "gloo": Gloo, "pycoll": Pycoll}


def pin(rank: int) -> None:
    """Pins this thread to one core; ranks are dealt to cores in turn."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def check(library: Any, nbytes: int) -> str | None:
    """Compares one all_reduce with the exact sum; returns what is wrong, or None.

    The values are small integers, which f32 adds exactly in any order.
    """
    pattern = (np.arange(nbytes // 4) % PATTERN_PERIOD).astype(np.float32)
    call, out = library.prepare(pattern * np.float32(library.rank + 1))
    call()
    want = pattern * np.float32(library.size * (library.size + 1) // 2)
    wrong = np.flatnonzero(out != want)
    if wrong.size == 0:
        return None
    first = int(wrong[0])
    return (
        f"{wrong.size} of {out.size} elements wrong, "
        f"the first at {first}: expected {want[first]}, got {out[first]}"
    )


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


def serve(library: Any, control: socket.socket) -> None:
    """Answers one JSON line per request until the driver closes the connection."""
    stream = control.makefile("rw", encoding="utf-8")
    nbytes, call = -1, lambda: None

    def reply(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    reply({"rank": library.rank, "pid": os.getpid(), "version": library.version,
           "versions": library.versions, "cores": sorted(os.sched_getaffinity(0))})  # fmt: skip
    for line in stream:
        request = json.loads(line)
        if request["nbytes"] != nbytes:
            nbytes, call = (
                request["nbytes"],
                lambda: None,
            )  # Frees the last size's arrays before the next.
            # Zeros, because in-place sums of anything else would grow to infinity.
            call, _ = library.prepare(np.zeros(nbytes // 4, np.float32))
        if request["do"] == "check":
            reply({"wrong": check(library, nbytes)})
        else:
            plan = request["warmup"], request["samples"], request["block"]
            reply({"block_ns": time_blocks(call, *plan)})


def main() -> None:
    adapter, address, pinned = sys.argv[1:4]
    library = ADAPTERS[adapter]()
    if pinned == "pin":
        pin(library.rank)
    control = socket.socket(socket.AF_UNIX)
    control.connect("\0" + address)
    gc.disable()
    serve(library, control)


if __name__ == "__main__":
    main()
