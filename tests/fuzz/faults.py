"""A rank fails at a random point of a random program: the errors that all others must raise."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from joining import joins_late
from processes import child_pids, pycoll_files

import pycoll
from pycoll import run_ranks

Comm = pycoll.Communicator
PROCESS_FAULTS = ("kill", "stop", "pause", "exit", "join_late", "join_too_late")
HARMLESS = ("pause", "late", "join_late")
FAULTS = (*PROCESS_FAULTS, "leave", "raise", "late", "too_late")
# How long the others may take to see that a process is gone, on a machine that is busy with other
# programs; and how long ranks wait for one that does not come.
NOTICE_S = 10.0
SHORT_S = 2.0
STOPPED_S = 2.5 * SHORT_S
LONG_S = 30.0
CALLS = 24
CALL_NAMES = ("all_reduce", "broadcast", "all_gather", "reduce", "scan", "messages", "barrier")


@dataclass(frozen=True)
class Fault:
    n: int
    threads: bool
    kind: str
    victim: int  # modulo n
    at: int  # before which call
    at_us: int | None  # of a signal: not there, but that much later, from outside
    counts: tuple[int, ...]  # elements of the calls, in turn
    calls: tuple[str, ...]  # in turn
    asynchronous: bool


def is_legal(fault: Fault) -> bool:
    return not (fault.threads and fault.kind in PROCESS_FAULTS)


def faults(kinds: tuple[str, ...] = FAULTS) -> st.SearchStrategy[Fault]:
    return st.builds(
        Fault,
        n=st.integers(2, 5),
        threads=st.booleans(),
        kind=st.sampled_from(kinds),
        victim=st.integers(0, 59),
        at=st.integers(0, CALLS - 2),
        at_us=st.one_of(st.none(), st.integers(0, 3000)),
        counts=st.lists(
            st.sampled_from([1, 100, 4096, 20_000, 131_073, 1_000_000]), min_size=1, max_size=3
        ).map(tuple),
        calls=st.lists(st.sampled_from(CALL_NAMES), min_size=1, max_size=4).map(tuple),
        asynchronous=st.booleans(),
    ).filter(is_legal)


def timeout_of(fault: Fault) -> float:
    return SHORT_S if fault.kind in ("stop", "too_late", "join_too_late") else LONG_S


@dataclass(frozen=True)
class Seen:
    error: str  # class, empty for none
    text: str
    rank: int  # of a PeerDiedError, as the signal
    began_s: float  # the call that raised
    raised_s: float
    signal: int = 0


def call(comm: Comm, fault: Fault, idx: int) -> None:
    name = fault.calls[idx % len(fault.calls)]
    x = np.ones(fault.counts[idx % len(fault.counts)], np.float32)
    root = {"root": idx % comm.size} if name in ("broadcast", "reduce") else {}
    if name == "messages":
        y = np.empty_like(x)
        sent = comm.send(x, (comm.rank + 1) % comm.size, idx, async_op=True)
        comm.recv(y, (comm.rank - 1) % comm.size, idx)
        sent.wait()
    elif name == "barrier":
        comm.barrier()
    elif fault.asynchronous:
        getattr(comm, name)(x, async_op=True, **root).wait()
    else:
        getattr(comm, name)(x, **root)


class Board:
    """Memory shared by the parent and its ranks: the rank to signal from outside, and the time."""

    def __init__(self) -> None:
        self.words = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def note(self) -> None:
        """Notes that the fault happens now, in this process."""
        self.words[1:3] = os.getpid(), time.monotonic_ns()
        self.words[0] = 1

    @property
    def fault_s(self) -> float:
        return self.words[2] / 1e9

    def signal_from_outside(self, fault: Fault, is_over: threading.Event) -> None:
        """Runs on a thread of the parent: a signal from outside arrives in the middle of a call."""
        while not self.words[0]:
            if is_over.wait(0.0005):
                return
        pid = int(self.words[1])
        with contextlib.suppress(ProcessLookupError):
            if fault.at_us is not None or fault.kind == "pause":
                time.sleep((fault.at_us or 0) / 1e6)
                os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            if fault.kind != "kill":
                is_over.wait(0.1 if fault.kind == "pause" else STOPPED_S)
                os.kill(pid, signal.SIGCONT)


def fail(comm: Comm, fault: Fault, board: Board) -> None:
    """Makes the victim fail, or begins to."""
    board.note()
    if fault.kind in ("kill", "stop") and fault.at_us is None:
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif fault.kind == "exit":
        os._exit(7)
    elif fault.kind == "leave":
        comm.close()
    elif fault.kind == "raise":
        raise ZeroDivisionError("the fault")
    elif fault.kind == "late":
        time.sleep(0.1)
    elif fault.kind == "too_late":
        time.sleep(STOPPED_S)


def work(comm: Comm, fault: Fault, board: Board) -> Seen:
    """Calls until one raises; where none may raise, makes CALLS calls."""
    is_victim = comm.rank == fault.victim % comm.size
    seen = Seen("", "", -1, time.monotonic(), 0)
    try:
        for idx in range(CALLS if fault.kind in HARMLESS else 10**6):
            seen = replace(seen, began_s=time.monotonic())
            if is_victim and idx == fault.at:
                fail(comm, fault, board)
                if fault.kind == "leave":
                    return seen
            call(comm, fault, idx)
    except pycoll.Error as error:
        # First the time: to format the text may take a while.
        seen = replace(seen, raised_s=time.monotonic(), error=type(error).__name__)
        seen = replace(seen, text=str(error), rank=getattr(error, "rank", -1))
        seen = replace(seen, signal=getattr(error, "signal", 0))
    return seen


@dataclass(frozen=True)
class Outcome:
    seen: list[Seen | Exception]
    slowest_s: float  # from the fault, or from the call that it hit, to the last error
    complaint: str  # what is wrong; empty: nothing


def warm_up() -> None:
    """Opens what a process opens only once."""
    for threads in (False, True):
        run_ranks(lambda comm: comm.barrier(), 2, threads=threads)


def run(fault: Fault) -> Outcome:
    """Runs it, and checks what the survivors saw and what is left behind."""
    before = resources()
    board, is_over = Board(), threading.Event()
    outside = threading.Thread(target=board.signal_from_outside, args=(fault, is_over))
    if fault.kind in ("kill", "stop", "pause"):
        outside.start()
    joins = contextlib.nullcontext()
    if fault.kind in ("join_late", "join_too_late"):
        time_s = 0.1 if fault.kind == "join_late" else STOPPED_S
        joins = joins_late(fault.victim % fault.n, time_s, board.note)
    try:
        with joins:
            seen = run_ranks(
                work,
                fault.n,
                fault,
                board,
                threads=fault.threads,
                timeout_s=timeout_of(fault),
                return_errors=True,
            )
    finally:
        is_over.set()
        if outside.ident is not None:
            outside.join()
    slowest_s, complaint = judge(fault, seen, board.fault_s)
    for one in seen:
        if isinstance(one, Exception):
            one.__traceback__ = None  # its frames hold communicators
    left = left_over(before)
    return Outcome(seen, slowest_s, complaint or left)


def judge(fault: Fault, outcomes: list[Seen | Exception], fault_s: float) -> tuple[float, str]:
    victim = fault.victim % fault.n
    slowest_s, num_timeouts = 0.0, 0
    for rank, seen in enumerate(outcomes):
        if fault.kind == "join_too_late":
            if rank == victim:
                continue
            # No rank has a communicator: init itself raises.
            if not isinstance(seen, pycoll.TimeoutError) or f"rank {victim}" not in str(seen):
                return 0, f"rank {rank} came out of init with {seen!r}"
            continue
        if fault.kind in HARMLESS:
            if not isinstance(seen, Seen) or seen.error:
                return 0, f"rank {rank} raised without a reason: {seen}"
            continue
        if rank == victim:
            continue
        if not isinstance(seen, Seen) or not seen.error:
            return 0, f"rank {rank} raised no error of pycoll: {seen!r}"
        took_s = seen.raised_s - max(seen.began_s, fault_s)
        slowest_s = max(slowest_s, took_s)
        deadline_s = NOTICE_S
        if fault.kind in ("stop", "too_late"):
            deadline_s += SHORT_S
            # A rank that sees another rank's timeout before its own passes that on.
            right = seen.error in ("TimeoutError", "AbortedError")
            # A message names its peer, which may be late because of another rank.
            is_message = seen.text.startswith(("send(", "recv("))
            right = right and (is_message or f"rank {victim}" in seen.text)
            # Or a message of this rank that had begun before timed out, and this call goes with it.
            in_another = f"rank {rank}'s " in seen.text and " timed out" in seen.text
            num_timeouts += seen.error == "TimeoutError" or in_another
        else:
            signum = signal.SIGKILL if fault.kind == "kill" else 0
            right = (seen.error, seen.rank, seen.signal) == ("PeerDiedError", victim, signum)
        if not right:
            return slowest_s, f"rank {rank} raised {seen.error}, rank {seen.rank}: {seen.text}"
        if took_s > deadline_s:
            return slowest_s, f"rank {rank} raised after {took_s:.2f} s: {seen.text}"
    if fault.kind in ("stop", "too_late") and not num_timeouts:
        return slowest_s, f"no rank raised TimeoutError: {outcomes}"
    return slowest_s, ""


def resources() -> tuple[set[str], set[int], int]:
    """Files with our name, children, and how many descriptors are open."""
    return pycoll_files(), child_pids(), len(os.listdir("/proc/self/fd"))


def left_over(before: tuple[set[str], set[int], int]) -> str:
    gc.collect()  # communicators in the cycles of tracebacks
    files, pids, num_fds = (now - then for now, then in zip(resources(), before, strict=True))
    left = {"files": files, "processes": pids, "descriptors": num_fds}
    return "".join(f"left behind: {what} {some}; " for what, some in left.items() if some)
