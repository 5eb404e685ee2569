"""all_reduce of torch.distributed on tensors of one GPU, by gloo, NCCL or pycoll, timed as
device_bench times pycoll's own calls.

python benchmarks/device_peers.py --ranks N BACKEND DEVICE DTYPE SIZE ...

Without --ranks it is one rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0 prints each row
as a line of JSON when it is measured, or
{"note": why not}.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LEAST_NCCL = (2, 30)
SAMPLES = 7


def num_calls_for(nbytes: int) -> int:
    """Calls in a row: enough for the clock, and not many of long ones."""
    return max(3, min(50, (1 << 28) // max(nbytes, 1)))


def why_not(backend: str, device: str) -> str | None:
    """Why this backend cannot be measured here."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return f"no torch: {error}"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    if backend == "gloo":
        return None if dist.is_gloo_available() else "this torch has no gloo"
    if backend == "pycoll":
        return None if importlib.util.find_spec("pycoll") else "pycoll is not installed"
    if not dist.is_nccl_available() or device != "cuda":
        return "this torch has no NCCL"
    found = nccl_version()
    if found < LEAST_NCCL:
        return f"NCCL is {'.'.join(map(str, found))}: ranks that share a GPU need 2.30"
    return None


def nccl_version() -> tuple[int, int]:
    """The version of the library that torch calls, which LD_PRELOAD may have replaced."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return (0, 0)
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10_000, code.value // 100 % 100


def measure(backend: str, device: str, dtype: str, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    if backend == "pycoll":
        import pycoll.torch  # noqa: F401  a checkout has no entry points
    dist.init_process_group(backend)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for nbytes in sizes:
        x = torch.zeros(max(nbytes // kind.itemsize, 1), dtype=kind, device=device)
        x += dist.get_rank() + 1
        dist.all_reduce(x)
        wait()
        n = dist.get_world_size()
        assert bool((x == n * (n + 1) // 2).all()), f"{backend}: wrong result of {nbytes} B"
        x.zero_()
        num_calls = num_calls_for(nbytes)
        samples = []
        for _ in range(SAMPLES):
            wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(num_calls):
                dist.all_reduce(x)
            wait()
            samples.append((time.perf_counter() - start) / num_calls)
        times = torch.tensor(samples, dtype=torch.float64, device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            row = {"nbytes": nbytes, "queued_us": statistics.median(times.tolist()) * 1e6}
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def run(
    backend: str, device: str, dtype: str, n: int, sizes: list[int], timeout_s: float
) -> dict[str, Any]:
    """One series by n processes. Returns its rows, and a note if some of them are missing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(n),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__)), backend, device, dtype, *map(str, sizes)]
    processes = [
        subprocess.Popen(
            command,
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    note = None
    outs: list[str] = []
    until = time.monotonic() + max(timeout_s, 1)
    try:
        for process in processes:
            outs.append(process.communicate(timeout=max(until - time.monotonic(), 0.1))[0])
    except subprocess.TimeoutExpired:
        note = f"not done after {timeout_s:.0f} s"
    finally:
        for process in processes:
            process.kill()
    outs += [process.communicate()[0] for process in processes[len(outs) :]]
    return rows_of(outs[0], len(sizes), note)


def rows_of(said: str, num_rows: int, note: str | None) -> dict[str, Any]:
    """The rows that a program has printed as lines of JSON, and a note if some are missing."""
    rows: list[dict[str, Any]] = []
    for line in said.splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            found = json.loads(line)
            note = found.pop("note", note)
            rows += [found] if found else []
    if note is None and len(rows) < num_rows:
        note = f"failed: {(said.splitlines() or [''])[-1][-300:]}"
    return {"rows": rows} | ({} if note is None else {"note": note})


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "--ranks":
        n, backend, device, dtype, *sizes = arguments[1:]
        print(json.dumps(run(backend, device, dtype, int(n), [int(s) for s in sizes], 30.0)))
        return
    backend, device, dtype, *sizes = arguments
    reason = why_not(backend, device)
    if reason is not None:
        print(json.dumps({"note": reason}))
        return
    measure(backend, device, dtype, [int(size) for size in sizes])


if __name__ == "__main__":
    main()
