"""Ranks that are late: what they do after the others have given up must change nothing there.

python tests/comm/late_ranks.py [TRIES]     # 200 tries of each scene, about half an hour
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pycoll

Comm = pycoll.Communicator
Arrays = Callable[[Comm, int], np.ndarray]

COUNT = 4 << 20  # elements, float32: a copy takes milliseconds
RESTORED = 777  # what the caller writes once it has the error
TIMEOUT_S = 1.0


def plain(comm: Comm, count: int) -> np.ndarray:
    comm.register_after = 0
    return np.ones(count, np.float32)


def adopted(comm: Comm, count: int) -> np.ndarray:
    """The registration cache takes it after some uses."""
    return np.ones(count, np.float32)


def registered(comm: Comm, count: int) -> np.ndarray:
    x = np.ones(count, np.float32)
    comm.register(x)
    return x


def heap(comm: Comm, count: int) -> np.ndarray:
    x = comm.empty(count, np.float32)
    x[:] = 1
    return x


def of_torch(comm: Comm, count: int) -> np.ndarray:
    """The memory of a tensor; the collectives get the tensor's own array."""
    import torch

    return torch.ones(count).numpy()


ARRAYS: dict[str, Arrays] = {
    "plain": plain,
    "adopted": adopted,
    "registered": registered,
    "heap": heap,
    "torch": of_torch,
}
SCENES = ("timeout", "death", "close", "shrink")


def call_until_error(comm: Comm, x: np.ndarray, out: np.ndarray) -> tuple[str, int]:
    """Calls all_reduce until it raises. Returns the error, and how many calls were wrong."""
    wrong = 0
    try:
        while True:
            out[:] = 0
            comm.all_reduce(x, "sum", out)
            wrong += int((out != comm.size).any())
    except pycoll.Error as error:
        return type(error).__name__, wrong


def scene(comm: Comm, kind: str, arrays: str, stop_after_s: float) -> dict[str, Any]:
    """The last rank is stopped at some moment and goes on after the others have given up.

    Returns on each rank: the error, the number of calls that returned a wrong result, and on the
    others the number of elements that were changed after the error.
    """
    late = comm.size - 1
    x, out = (ARRAYS[arrays](comm, COUNT) for _ in range(2))
    for _ in range(10):
        comm.all_reduce(x, "sum", out)
    pids = comm.all_gather(np.array([os.getpid()]))
    comm.barrier()
    if comm.rank == late:
        # A process of its own, so that the rank may be anywhere when it is stopped.
        command = f"sleep {stop_after_s}; kill -STOP {os.getpid()}"
        with subprocess.Popen(["sh", "-c", command]):
            error, wrong = call_until_error(comm, x, out)
        return {"error": error, "wrong": wrong}
    if kind == "death" and comm.rank == 0:
        time.sleep(stop_after_s + 0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    error, wrong = call_until_error(comm, x, out)
    world = comm
    if kind == "close":
        comm.close()
    elif kind == "shrink":
        world = comm.shrink(timeout_s=2.5)
    x[:] = out[:] = RESTORED
    if kind == "shrink":
        world.barrier()
    os.kill(int(pids[late]), signal.SIGCONT)
    changed = 0
    end_s = time.monotonic() + 0.4
    goes_on = np.ones(1, bool)
    while goes_on[0]:
        goes_on[0] = time.monotonic() < end_s
        if kind == "shrink":  # training goes on: each step writes what is there already
            world.broadcast(goes_on, 0)
            world.all_reduce(x, "max", out)
        changed = max(changed, int((x != RESTORED).sum() + (out != RESTORED).sum()))
    return {"error": error, "wrong": wrong, "changed": changed}


def run_scene(n: int, kind: str, arrays: str, stop_after_s: float) -> list[dict[str, Any]]:
    """The outcomes of the ranks that were not killed."""
    outcomes = pycoll.run_ranks(
        scene, n, kind, arrays, stop_after_s, timeout_s=TIMEOUT_S, return_errors=True
    )
    if kind == "death":
        del outcomes[0]  # the victim
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def faults_of(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in outcomes if one["wrong"] or one.get("changed")]


# Every scene and every kind of array, in few runs: (scene, arrays, ranks).
FEW = (
    ("timeout", "plain", 3),
    ("timeout", "torch", 2),
    ("death", "adopted", 3),
    ("close", "registered", 2),
    ("shrink", "adopted", 3),
    ("shrink", "heap", 4),
)


def can_be(n: int, kind: str) -> bool:
    """A majority must be left to shrink, and one more rank to die."""
    return n > 2 or kind in ("timeout", "close")


def main() -> None:
    tries = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    num_wrong = 0
    for kind, arrays in itertools.product(SCENES, ARRAYS):
        bad = 0
        for i in range(tries):
            n = 2 + i % 3
            if can_be(n, kind):
                bad += bool(faults_of(run_scene(n, kind, arrays, 0.02 + 0.0017 * (i % 50))))
        print(f"{kind}, {arrays}: {bad} of {tries} tries with wrong values", flush=True)
        num_wrong += bad
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
