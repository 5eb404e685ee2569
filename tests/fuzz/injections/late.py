"""Late ranks: one is stopped, the others give up, and it goes on: nothing of theirs may change.

The last rank is stopped at some moment of a loop of one operation. The other ranks get an error, in
the end by the deadline, restore their arrays, and go on: alone, in a closed communicator, or in the
world after a shrink. Then the late rank goes on and, once it has its own error, overwrites its own
arrays.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import mmap
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import builds
import numpy as np
from late_arrays import ARRAYS, DEVICE_ARRAYS, Array
from late_operations import DEVICE_OPERATIONS, OPERATIONS, value_of

import pycoll
from injections import Outcome

Comm = pycoll.Communicator

SCENES = ("timeout", "death", "close", "shrink")
COMBINATIONS = list(itertools.product(SCENES, ARRAYS))
TRIES = 200  # of each combination in a whole campaign
CASES = TRIES * len(COMBINATIONS)
# Every scene and every kind of array at least once.
FEW = [turn * len(COMBINATIONS) + i * 5 for turn in range(2) for i in range(len(ARRAYS))]

COUNTS = (300, 21_000, 204_000, 1_200_000)  # elements, float32; multiples of 2, 3 and 4
# A busy machine may need longer than the first deadline to start: then the case runs again.
TIMEOUTS_S = (0.5, 2.0, 8.0)
RESTORED = 777  # what the caller writes once it has the error
OVERWRITTEN = -5  # what the late rank writes into its own arrays after its error
LATE_RETURNS_S = 15.0


@dataclass(frozen=True)
class Case:
    scene: str
    arrays: str
    n: int
    operation: str
    count: int
    in_parts: bool  # large messages go through the mailbox instead of from memory to memory
    stop_s: float  # from the start of the loop
    dies_s: float  # from the stop to the death of rank 0

    @classmethod
    def of(cls, seed: int) -> Case:
        turn, combination = divmod(seed, len(COMBINATIONS))
        scene, arrays = COMBINATIONS[combination]
        # A majority must be left to shrink, and one more rank to die.
        sizes = (2, 3, 4) if scene in ("timeout", "close") else (3, 4)
        rng = np.random.default_rng(seed)
        operations = list(DEVICE_OPERATIONS if arrays in DEVICE_ARRAYS else OPERATIONS)
        return cls(
            scene,
            arrays,
            sizes[turn % len(sizes)],
            operations[rng.integers(len(operations))],
            int(rng.choice(COUNTS)),
            bool(rng.integers(4) == 0),
            rng.uniform(0, 0.04),
            rng.uniform(0, 0.03),
        )


@dataclass
class Shared:
    """Memory that this process shares with the ranks that it forks."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, mmap.PAGESIZE))

    @property
    def late_pid(self) -> int:
        return int.from_bytes(self.memory[:8], "little")

    @late_pid.setter
    def late_pid(self, pid: int) -> None:
        self.memory[:8] = pid.to_bytes(8, "little")

    @property
    def late_has_returned(self) -> bool:
        return self.memory[8] == 1

    @late_has_returned.setter
    def late_has_returned(self, value: bool) -> None:
        self.memory[8] = value


@dataclass
class Report:
    """What one rank saw."""

    error: str = ""
    wrong_steps: list[int] = field(default_factory=list)  # calls that returned wrong values
    changed: int = 0  # elements that changed after the error


def signal_later(signum: int, after_s: float) -> threading.Thread:
    """A thread, so that the rank may be anywhere when it gets the signal."""

    def run() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def call_until_error(comm: Comm, case: Case, x: Array, out: Array, report: Report) -> None:
    call = OPERATIONS[case.operation]
    try:
        for step in itertools.count():
            if call(comm, x, out, step):
                report.wrong_steps.append(step)
    except pycoll.Error as error:
        report.error = type(error).__name__


def train(world: Comm, x: Array, out: Array, step: int, goes_on: bool) -> tuple[int, bool]:
    """A step in the world after the shrink: wrong elements, and whether rank 0 wants another."""
    decision = np.array([goes_on])
    world.broadcast(decision, 0)
    wrong = OPERATIONS["all_reduce"](world, x, out, step)
    return wrong + x.other_than(value_of(step, world.rank)), bool(decision[0])


def watch(comm: Comm, world: Comm, case: Case, x: Array, out: Array, shared: Shared) -> int:
    """Lets the late rank go on, and counts the elements that change until after its return."""
    end_s = time.monotonic() + LATE_RETURNS_S
    changed = 0
    goes_on = True
    for step in itertools.count():
        if not goes_on:
            return changed
        is_last = shared.late_has_returned
        if not is_last:
            assert time.monotonic() < end_s, "the late rank did not return"
            # Again and again, because its stop may still be to come.
            os.kill(shared.late_pid, signal.SIGCONT)
            time.sleep(0.002)
        if case.scene == "shrink":
            wrong, goes_on = train(world, x, out, step, not is_last)
            changed = max(changed, wrong)
        else:
            goes_on = not is_last
            changed = max(changed, x.other_than(RESTORED) + out.other_than(RESTORED))


def run_rank(comm: Comm, case: Case, shared: Shared) -> Report:
    late = comm.size - 1
    x, out = (ARRAYS[case.arrays](comm, case.count) for _ in range(2))
    for step in range(10):  # the registration cache takes an array after some uses
        OPERATIONS[case.operation](comm, x, out, step)
    if comm.rank == late:
        shared.late_pid = os.getpid()
    comm.barrier()
    report = Report()
    if comm.rank == late:
        stop = signal_later(signal.SIGSTOP, case.stop_s)
    elif case.scene == "death" and comm.rank == 0:
        signal_later(signal.SIGKILL, case.stop_s + case.dies_s)
    call_until_error(comm, case, x, out, report)
    if comm.rank == late:
        stop.join()
        x.fill(OVERWRITTEN)
        out.fill(OVERWRITTEN)
        shared.late_has_returned = True
        return report
    world = comm
    if case.scene == "close":
        comm.close()
    elif case.scene == "shrink":
        world = comm.shrink(timeout_s=2 * comm.timeout_s)
    x.fill(RESTORED)
    out.fill(RESTORED)
    if case.scene == "shrink":
        world.barrier()
    report.changed = watch(comm, world, case, x, out, shared)
    return report


def complaint_of(case: Case, reports: list[Report]) -> str:
    texts = []
    for i, report in enumerate(reports):
        if report.wrong_steps:
            texts.append(f"report {i}: wrong values returned in calls {report.wrong_steps[:5]}")
        if report.changed:
            texts.append(f"report {i}: {report.changed} elements changed after {report.error}")
    return f"{case}: {'; '.join(texts)}" if texts else ""


@functools.cache
def emulated_device() -> str:
    folder = builds.plain()
    builds.build(folder, "device_threads")
    return str(folder / "_device_threads.so")


def run_once(case: Case, timeout_s: float) -> list[Any]:
    """The reports of the ranks that were not killed, or their exceptions."""
    settings = {"PYCOLL_PEER_MEMORY": "0" if case.in_parts else "1"}
    if case.arrays in DEVICE_ARRAYS:
        settings["PYCOLL_DEVICE_LIBRARY"] = emulated_device()
    if case.arrays == "torch":
        importlib.import_module("torch")  # once, and not in each rank, while the others wait
    with mock.patch.dict(os.environ, settings):
        outcomes = pycoll.run_ranks(
            run_rank, case.n, case, Shared(), timeout_s=timeout_s, return_errors=True
        )
    return outcomes[1:] if case.scene == "death" else outcomes


def run_case(seed: int) -> Outcome:
    case = Case.of(seed)
    label = f"{case.scene} {case.arrays}"
    errors: list[BaseException] = []
    for timeout_s in TIMEOUTS_S:
        outcomes = run_once(case, timeout_s)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        reports = [one for one in outcomes if isinstance(one, Report)]
        if complaint := complaint_of(case, reports):
            return Outcome(complaint, label=label)
        if not errors:
            return Outcome(label=label)
        if not all(isinstance(error, pycoll.Error) for error in errors):
            break
        label += " again"  # the machine was too busy for this deadline
    return Outcome(f"{case}: {errors!r}", label=label)
