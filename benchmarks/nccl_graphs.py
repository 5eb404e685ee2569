"""all_reduce of NCCL by n communicators of one process on one GPU, replayed from one graph: what
pycoll's ranks as threads are compared with. It calls NCCL through ctypes and takes memory, streams
and graphs from torch.

python benchmarks/nccl_graphs.py N DTYPE SIZE ...

It prints each row as a line of JSON when it is measured, or {"note": why not}. Ranks that share a
GPU need NCCL 2.30, which .nccl/libnccl.so.2 or LD_PRELOAD may bring along.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from device_peers import LEAST_NCCL, SAMPLES, nccl_version, rows_of

NODES = 50  # of a graph, for short messages
SUM = 0  # ncclSum
DTYPES = {"f32": 7, "bf16": 9}  # ncclFloat32, ncclBfloat16
# The blocks of all communicators must be resident at once.
MAX_CTAS = {2: 16, 4: 8, 8: 4}


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Nccl:
    """The functions that are called here. A status other than 0 raises RuntimeError."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        self.library.ncclGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            said = self.library.ncclGetErrorString(status).decode()
            raise RuntimeError(f"{name}: {said}")

    def communicators(self, n: int) -> list[ctypes.c_void_p]:
        unique = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(unique))
        made = [ctypes.c_void_p() for _ in range(n)]
        self("ncclGroupStart")
        for rank, comm in enumerate(made):
            self("ncclCommInitRank", ctypes.byref(comm), n, unique, rank)
        self("ncclGroupEnd")
        return made


def why_not() -> str | None:
    """Why it cannot be measured here."""
    try:
        import torch
    except ImportError as error:
        return f"no torch: {error}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    found = nccl_version()
    if found == (0, 0):
        return "this torch has no NCCL"
    if found < LEAST_NCCL:
        return f"NCCL is {'.'.join(map(str, found))}: ranks that share a GPU need 2.30"
    return None


def measure(n: int, dtype: str, sizes: list[int]) -> None:
    import torch

    nccl = Nccl()
    comms = nccl.communicators(n)
    streams = [torch.cuda.Stream() for _ in range(n)]
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def all_reduce(arrays: list[Any], outs: list[Any]) -> None:
        nccl("ncclGroupStart")
        for x, out, comm, stream in zip(arrays, outs, comms, streams, strict=True):
            nccl(
                "ncclAllReduce",
                *(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())),
                *(ctypes.c_size_t(x.numel()), DTYPES[dtype], SUM, comm),
                ctypes.c_void_p(stream.cuda_stream),
            )
        nccl("ncclGroupEnd")

    for nbytes in sizes:
        count = max(nbytes // kind.itemsize, 1)
        arrays = [torch.full((count,), rank + 1, dtype=kind, device="cuda") for rank in range(n)]
        outs = [torch.empty_like(x) for x in arrays]
        torch.cuda.synchronize()
        all_reduce(arrays, outs)
        torch.cuda.synchronize()
        right = all(bool((out == n * (n + 1) // 2).all()) for out in outs)
        assert right, f"NCCL: wrong result of {nbytes} B"
        nodes = NODES if nbytes <= 1 << 20 else 5
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            here = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(here)
            for _ in range(nodes):
                all_reduce(arrays, outs)
            for stream in streams:
                here.wait_stream(stream)
        samples = []
        for _ in range(SAMPLES + 1):  # the first one is a warm-up
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) / nodes)
        us = statistics.median(samples[1:]) * 1e6
        print(json.dumps({"nbytes": nbytes, "queued_us": us}), flush=True)


def run(n: int, dtype: str, sizes: list[int], timeout_s: float, emulated: bool) -> dict[str, Any]:
    """One series, in a process of its own. Returns its rows, and a note if some are missing."""
    if emulated:
        return {"note": "skipped: NCCL needs a GPU"}
    if timeout_s < 5:
        return {"note": "no time was left"}
    command = [sys.executable, str(Path(__file__)), str(n), dtype, *map(str, sizes)]
    more = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(MAX_CTAS.get(n, 4))}
    process = subprocess.Popen(
        command, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    note = None
    try:
        said = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        note = f"not done after {timeout_s:.0f} s"
        process.kill()
        said = process.communicate()[0]
    return rows_of(said, len(sizes), note)


def main() -> None:
    n, dtype, *sizes = sys.argv[1:]
    reason = why_not()
    if reason is not None:
        print(json.dumps({"note": reason}))
        return
    measure(int(n), dtype, [int(size) for size in sizes])


if __name__ == "__main__":
    main()
