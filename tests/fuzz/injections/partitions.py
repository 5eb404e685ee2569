"""The cable of one of three hosts is pulled at a random moment, for a moment or for long.

Nothing is lost in a moment: every result is right, and no call raises. After a long one the two
hosts that still reach each other go on in a new world, with right results, and the third does not.
"""

from __future__ import annotations

import atexit
import functools
import time
from dataclasses import dataclass
from typing import Any

import namespaces
import numpy as np
from driving import drawn
from faults import Board
from hypothesis import strategies as st
from programs import Program, programs
from runner import run_program

import pycoll
from injections import Outcome

CASES = 50
FEW = (1, 2, 3)
SILENCE_S = 2.0  # a moment, with what TCP takes to send again on a busy machine, is shorter
TIMEOUT_S = 20.0
NUM_HOSTS = 3

Comm = pycoll.Communicator
why_not = namespaces.why_not


@functools.cache
def network() -> namespaces.Network:
    """The hosts of all cases of this process."""
    made = namespaces.Network(NUM_HOSTS)
    atexit.register(made.close)
    return made


@dataclass(frozen=True)
class Partition:
    per_host: int
    host: int  # whose cable is pulled
    after_ms: int
    heals_after_ms: int  # 0: never
    program: Program


def partitions() -> st.SearchStrategy[Partition]:
    return st.builds(
        Partition,
        per_host=st.integers(1, 2),
        host=st.integers(0, NUM_HOSTS - 1),
        after_ms=st.integers(0, 300),
        heals_after_ms=st.sampled_from([0, 50, 200]),
        program=programs(at_most=8),
    )


def work(comm: Comm, case: Partition, board: Board) -> Any:
    """The old ranks of the world that goes on; None where none was needed."""
    comm.barrier()
    board.note()
    end_s = time.monotonic() + (case.after_ms + case.heals_after_ms) / 1e3 + 0.5
    try:
        while comm.all_reduce(np.array(time.monotonic() < end_s or not case.heals_after_ms), "min"):
            run_program(comm, case.program)
        return None
    except pycoll.PeerDiedError:
        with comm.shrink(TIMEOUT_S) as new:
            run_program(new, case.program)
            new.barrier()
            return new.former_ranks


def run(case: Partition) -> list[namespaces.Outcome]:
    hosts = network()
    env = {"PYCOLL_SILENCE_S": str(SILENCE_S), "timeout_s": str(TIMEOUT_S)}
    board = Board()
    pids = hosts.start_ranks(work, case.per_host, case, board, **env)
    try:
        end_s = time.monotonic() + TIMEOUT_S
        while not board.words[0] and time.monotonic() < end_s:  # before, a missing rank has no name
            time.sleep(0.001)
        time.sleep(case.after_ms / 1e3)
        hosts.set_link(case.host, False)
        if case.heals_after_ms:
            time.sleep(case.heals_after_ms / 1e3)
            hosts.set_link(case.host, True)
        return hosts.outcomes(pids, 3 * TIMEOUT_S)
    finally:
        hosts.set_link(case.host, True)


def complaint(case: Partition, outcomes: list[namespaces.Outcome]) -> str:
    n = NUM_HOSTS * case.per_host
    goes_on = [rank for rank in range(n) if rank // case.per_host != case.host]
    for rank, seen in enumerate(outcomes):
        right = not seen.error and seen.value == (None if case.heals_after_ms else goes_on)
        if not case.heals_after_ms and rank not in goes_on:
            right = seen.error == "PeerDiedError"
        if not right or seen.ended:
            return f"rank {rank}: {seen}"
    return ""


def run_case(seed: int) -> Outcome:
    case = drawn(partitions(), seed)
    text = complaint(case, run(case))
    label = "for a moment" if case.heals_after_ms else "for long"
    return Outcome(f"{text}\n{case}" if text else "", label=label)
