"""A rank is killed while kernels wait for it: the others are told its name, and go on without it.

All ranks repeat one operation on device arrays and compare each result, until the victim is killed
at a random moment. After the error the others shrink, and use their devices in the new world.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from faults import Board, left_over, resources
from late_arrays import ARRAYS, DEVICE_ARRAYS
from late_operations import DEVICE_OPERATIONS, OPERATIONS
from worlds import end, start

import pycoll
from injections import Outcome
from injections.late import emulated_device
from pycoll.arrays.device import DeviceArray

CASES = 200
FEW = (1, 2, 3, 4)
TIMEOUT_S = 30.0  # no wait may last so long
NOTICE_S = 5.0  # a busy machine included; the tally prints the median
COUNTS = (300, 21_000, 204_000)

Comm = pycoll.Communicator


@dataclass(frozen=True)
class Case:
    n: int
    victim: int
    arrays: str
    operation: str
    count: int
    after_s: float  # from the first call to the death

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = np.random.default_rng(seed)
        n = 2 + seed % 3
        operations = [name for name in DEVICE_OPERATIONS if "messages" not in name]
        return cls(
            n,
            int(rng.integers(n)),
            DEVICE_ARRAYS[seed % len(DEVICE_ARRAYS)],
            operations[rng.integers(len(operations))],
            int(rng.choice(COUNTS)),
            rng.uniform(0, 0.1),
        )


@dataclass(frozen=True)
class Seen:
    """What one of the others saw."""

    error: str
    text: str
    is_named: bool
    began_s: float  # of the call that raised
    raised_s: float
    wrong_steps: tuple[int, ...] = ()


def run_rank(comm: Comm, case: Case, board: Board) -> Seen | None:
    x, out = (ARRAYS[case.arrays](comm, case.count) for _ in range(2))
    call = OPERATIONS[case.operation]
    wrong = [step for step in range(2) if call(comm, x, out, step)]
    comm.barrier()
    if comm.rank == case.victim:
        threading.Thread(target=die, args=(case, board), daemon=True).start()
    seen = None
    for step in itertools.count():
        began_s = time.monotonic()
        try:
            if call(comm, x, out, step):
                wrong.append(step)
        except pycoll.Error as error:
            raised_s = time.monotonic()
            is_named = getattr(error, "rank", -1) == case.victim
            name, text = type(error).__name__, str(error)
            seen = Seen(name, text, is_named, began_s, raised_s, tuple(wrong))
            break
    world = comm.shrink(TIMEOUT_S)
    y = DeviceArray.of(np.full(case.count, world.rank + 1, np.float32))
    world.all_reduce(y)
    total = sum(range(1, world.size + 1))
    assert world.size == case.n - 1 and (y.numpy() == total).all(), "the new world's sum is wrong"
    return seen


def die(case: Case, board: Board) -> None:
    time.sleep(case.after_s)
    board.note()
    os.kill(os.getpid(), signal.SIGKILL)


def complaint_of(case: Case, outcomes: list[Any], board: Board) -> tuple[str, tuple[float, ...]]:
    notices_s = []
    for rank, seen in enumerate(outcomes):
        if rank == case.victim:
            continue
        if not isinstance(seen, Seen):
            return f"rank {rank}: {seen}", ()
        if seen.wrong_steps:
            return f"rank {rank}: wrong values in calls {seen.wrong_steps[:5]}", ()
        notices_s.append(seen.raised_s - max(seen.began_s, board.fault_s))
        if seen.error != "PeerDiedError" or not seen.is_named or notices_s[-1] > NOTICE_S:
            after = f"after {notices_s[-1]:.2f} s"
            return f"rank {rank}: {after}: {seen.error}: {seen.text}", tuple(notices_s)
    return "", tuple(notices_s)


def run_case(seed: int) -> Outcome:
    case, board = Case.of(seed), Board()
    before = resources()
    try:
        with mock.patch.dict(os.environ, PYCOLL_DEVICE_LIBRARY=emulated_device()):
            processes = start(run_rank, case.n, case, board, timeout_s=TIMEOUT_S)
            complaint, notices_s = complaint_of(case, end(processes), board)
    except AssertionError as error:
        complaint, notices_s = str(error), ()
    complaint = complaint or left_over(before)
    return Outcome(f"{complaint}\n{case}" if complaint else "", notices_s, case.operation)
