"""Two processes that share a device: whether they agree, what a call takes, and by which path.

python benchmarks/device_processes.py
"""

from __future__ import annotations

import time

import numpy as np

import pycoll
from pycoll.arrays.device import DeviceArray

COUNT = 100_003
CALLS = 20


def work(comm: pycoll.Communicator) -> tuple[bool, float, str]:
    x = DeviceArray.of(np.full(COUNT, comm.rank + 1, np.float32))
    comm.all_reduce(x)
    right = bool((x.numpy() == 3).all())
    start = time.perf_counter()
    for _ in range(CALLS):
        comm.all_reduce(x)
    comm.synchronize()
    call_ms = (time.perf_counter() - start) / CALLS * 1e3
    return right, call_ms, comm.explain("all_reduce", 4 * COUNT, on_device=True)


def main() -> None:
    right, call_ms, path = pycoll.run_ranks(work, 2, timeout_s=30)[0]
    print("right" if right else "WRONG", f"{call_ms:.3f} ms for a call")
    print("\n".join(path.splitlines()[:3]))
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
