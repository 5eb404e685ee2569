"""Ranks are stopped and continued many times, each time for a moment: every result is right.

No call may raise, and the ranks leave nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from dataclasses import dataclass

from driving import drawn
from faults import left_over, resources
from hypothesis import strategies as st
from programs import Program, programs
from runner import run_program
from worlds import end, start

from injections import Outcome
from injections.kills import kill_all

CASES = 300
FEW = (1, 2)
TIMEOUT_S = 20.0
MAX_PAUSE_S = 0.05


@dataclass(frozen=True)
class Pauses:
    n: int
    program: Program
    runs: int
    seed: int  # of the moments


def pauses() -> st.SearchStrategy[Pauses]:
    return st.builds(
        Pauses,
        n=st.integers(2, 5),
        program=programs(at_most=10),
        runs=st.integers(1, 8),
        seed=st.integers(0, 1 << 30),
    )


def work(comm, case: Pauses) -> None:
    for _ in range(case.runs):
        run_program(comm, case.program)


def pause(pidfds: list[int], case: Pauses, is_over: threading.Event) -> None:
    """Stops a rank, waits, continues it, and so on."""
    moments = random.Random(case.seed)
    while not is_over.wait(moments.uniform(0, MAX_PAUSE_S / 5)):
        rank = moments.choice(pidfds)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank, signal.SIGSTOP)
            is_over.wait(moments.uniform(0, MAX_PAUSE_S))
            signal.pidfd_send_signal(rank, signal.SIGCONT)


def run_case(seed: int) -> Outcome:
    case = drawn(pauses(), seed)
    before = resources()
    processes = start(work, case.n, case, timeout_s=TIMEOUT_S)
    is_over = threading.Event()
    pidfds = [os.pidfd_open(process.pid) for process in processes]
    pausing = threading.Thread(target=pause, args=(pidfds, case, is_over))
    hang = threading.Timer(3 * TIMEOUT_S, kill_all, [processes])
    pausing.start()
    hang.start()
    complaint = ""
    try:
        if any(outcome is not None for outcome in end(processes)):
            complaint = "a rank hung"
    except AssertionError as error:
        complaint = str(error)
    finally:
        is_over.set()
        pausing.join()
        hang.cancel()
        hang.join()
        for pidfd in pidfds:
            os.close(pidfd)
    complaint = complaint or left_over(before)
    return Outcome(f"{complaint}\n{case}" if complaint else "")
