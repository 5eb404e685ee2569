"""Runs the main kernels on few elements and checks the results: what compute-sanitizer looks at.

python benchmarks/device_kernels.py [ranks ...]
"""

from __future__ import annotations

import sys

import numpy as np

import pycoll
from pycoll.arrays.device import DeviceArray

COUNTS = (1, 33, 4099, 70_001)
ALGORITHMS = ("one_shot/ll", "two_shot/ll", "two_shot/simple", "ring/simple")
TIMEOUT_S = 100  # sanitizers are slow


def filled(comm: pycoll.Communicator, count: int, dtype: str) -> np.ndarray:
    """Values of this rank whose sum every dtype holds exactly."""
    own = (np.arange(count) + comm.rank) % 5
    return own.astype(pycoll.arrays.memory.numpy_dtype(dtype))


def total(comm: pycoll.Communicator, count: int) -> np.ndarray:
    return sum((np.arange(count) + rank) % 5 for rank in range(comm.size))


def check_all_reduce(comm: pycoll.Communicator, dtype: str) -> int:
    """Every algorithm and protocol that a communicator chooses from. Returns how many calls."""
    num_calls = 0
    for count in COUNTS:
        expected = total(comm, count)
        for algorithm in ALGORITHMS:
            x = DeviceArray.of(filled(comm, count, dtype))
            comm.all_reduce(x, algorithm=algorithm)
            np.testing.assert_array_equal(x.numpy().astype(np.int64), expected, algorithm)
            num_calls += 1
        x = comm.empty(count, dtype, device=0)  # collective
        out = comm.empty(count, dtype, device=0)
        x.copy_from(filled(comm, count, dtype))
        comm.all_reduce(x, out=out, algorithm="two_shot/direct")
        np.testing.assert_array_equal(out.numpy().astype(np.int64), expected, "two_shot/direct")
        num_calls += 1
    return num_calls


def check_moves(comm: pycoll.Communicator) -> int:
    """all_gather and all_to_all, which only move bytes."""
    n = comm.size
    for count in COUNTS:
        x = DeviceArray.of(np.full(count, comm.rank, np.int32))
        gathered = comm.all_gather(x).numpy().reshape(n, count)
        np.testing.assert_array_equal(gathered, np.repeat(np.arange(n), count).reshape(n, count))
        y = DeviceArray.of(np.repeat(np.arange(n) + 10 * comm.rank, count).astype(np.int32))
        got = comm.all_to_all(y).numpy().reshape(n, count)
        np.testing.assert_array_equal(got[:, 0], 10 * np.arange(n) + comm.rank)
    return 2 * len(COUNTS)


def check(comm: pycoll.Communicator) -> int:
    num_calls = sum(check_all_reduce(comm, dtype) for dtype in ("f32", "f16", "i32"))
    return num_calls + check_moves(comm)


def main() -> None:
    for n in [int(argument) for argument in sys.argv[1:]] or [2, 3]:
        # Threads of one process: one cooperative launch, and a sanitizer sees all of it.
        num_calls = pycoll.run_ranks(check, n, threads=True, timeout_s=TIMEOUT_S)[0]
        print(f"{n} ranks: {num_calls} calls, all results right", flush=True)


if __name__ == "__main__":
    main()
