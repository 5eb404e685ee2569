"""A rank is killed at a random moment, from its call of init on: each other rank is told its name.

All ranks run a random program again and again and compare every result with NumPy; between two
runs, some worlds shrink or take a newcomer, or one rank computes for longer. After the error the
others shrink, and their new world's results are right, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
from driving import drawn
from faults import NOTICE_S, Board, left_over, resources
from hypothesis import strategies as st
from namespaces import free_port
from programs import Program, programs
from runner import Part, Runner
from worlds import Process, end, start

import pycoll
from injections import Outcome
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.coalesce import Coalesced

CASES = 1000
FEW = (1, 2, 3, 4, 5, 6)
TIMEOUT_S = 20.0  # no wait may last so long
JOIN_S = 3.0  # of init: the others cannot know of a rank that is killed before it has come
NEWCOMER_S = 0.5  # that newcomers have to see the end, once all others have
GIVEN_UP = "a rank was killed"
BETWEEN = ("", "shrink", "grow", "agree")
# What may wait for another rank.
CALLS = [(pycoll.Work, "wait"), (Coalesced, "__exit__")] + [
    (pycoll.Communicator, name)
    for name in (
        *ORACLES,
        "barrier",
        "send",
        "recv",
        "recv_any",
        "split",
        "shrink",
        "grow",
        "agree",
    )
]

Comm = pycoll.Communicator


@dataclass(frozen=True)
class Kill:
    n: int
    victim: int  # modulo n
    joining: bool  # the time begins with init, else with the program
    after_us: int
    program: Program
    between: str  # what all ranks call between two runs: one of BETWEEN; "grow": after the first
    busy_ms: int  # of rank 0, between two runs of the program
    signal: int


def kills() -> st.SearchStrategy[Kill]:
    return st.builds(
        Kill,
        n=st.integers(2, 5),
        victim=st.integers(0, 59),
        joining=st.sampled_from([False, False, False, True]),
        after_us=st.one_of(st.integers(0, 15_000), st.integers(0, 100_000)),
        program=programs(at_most=10),
        between=st.sampled_from(BETWEEN),
        busy_ms=st.sampled_from([0, 0, 50]),
        signal=st.sampled_from([signal.SIGKILL, signal.SIGTERM]),
    )


@dataclass
class Seen:
    """What one of the others saw."""

    where: str  # the operation that raised; "shrink": that admitted the end without an error
    error: str = ""
    text: str = ""
    is_named: bool = False  # the error has the victim's rank
    began_s: float = 0.0
    raised_s: float = 0.0
    agreed: tuple[int, ...] = ()  # what `agree` returned, each time


class Clock:
    """Since when this rank has been in its last call that may wait."""

    entered_s = 0.0

    def __enter__(self) -> None:
        self.patches = contextlib.ExitStack()
        for owner, name in CALLS:
            timed = self.timed(getattr(owner, name))
            self.patches.enter_context(mock.patch.object(owner, name, timed))

    def __exit__(self, *raised: object) -> None:
        self.patches.close()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def enter(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(args[-1], TracebackType):  # __exit__ after an error does not wait
                self.entered_s = time.monotonic()
            return call(*args, **kwargs)

        return enter


class Run:
    """One rank's part in a case."""

    def __init__(self, comm: Comm, case: Kill, address: str, has_grown: bool = False) -> None:
        self.comm, self.case, self.address, self.has_grown = comm, case, address, has_grown
        self.victim = case.victim % case.n
        self.seen = Seen("")
        self.parts: list[Part] = []
        self.agreed: list[int] = []

    def until_killed(self) -> Seen:
        clock = Clock()
        try:
            with clock:
                while self.seen.where != "shrink":
                    self.once()
        except pycoll.Error as error:
            self.seen.raised_s = time.monotonic()  # first: a text takes a while
            self.seen.began_s = clock.entered_s
            self.seen.error, self.seen.text = type(error).__name__, str(error)
            self.seen.is_named = self.victim in self.ranks_of(error)
            for part in self.parts[
                1:
            ]:  # its members may wait for this rank, and not for the victim
                if part.comm is not None and not part.comm.closed:
                    part.comm.abort(GIVEN_UP)
            self.comm = self.comm.shrink(TIMEOUT_S)
        self.check_survivors()
        return replace(self.seen, agreed=tuple(self.agreed))

    def once(self) -> None:
        self.parts = [Part(self.comm, list(range(self.comm.size)))]
        runner = Runner(self.comm, self.parts)
        for op in self.case.program:
            self.begin(type(op).__name__)
            runner.run(op)
        self.begin("Wait")
        runner.wait()
        self.begin("Barrier")
        self.comm.barrier()
        for part in self.parts[1:]:
            if part.comm is not None:
                part.comm.close()
        runner.places.unregister()
        if self.comm.rank == 0:
            time.sleep(self.case.busy_ms / 1e3)
        self.parts = []
        if self.case.between == "shrink":
            self.begin("shrink")
            self.comm = self.comm.shrink(TIMEOUT_S)
            self.seen.where = "shrink" if self.comm.size < self.case.n else ""
        elif self.case.between == "agree":
            self.begin("agree")
            self.agreed.append(self.comm.agree(number_of(self.comm.rank, len(self.agreed)), "min"))
        elif self.case.between == "grow" and not self.has_grown:
            self.begin("grow")
            self.comm = self.comm.grow(1, self.address, TIMEOUT_S)
            self.has_grown = True

    def begin(self, where: str) -> None:
        self.seen = Seen(where)

    def ranks_of(self, error: pycoll.Error) -> set[int]:
        """The rank that the error names, by its number in the world; of a part, in each one."""
        rank = getattr(error, "rank", -1)
        return {p.members[rank] for p in self.parts if 0 <= rank < len(p.members)} or {rank}

    def check_survivors(self) -> None:
        size, former = self.comm.size, self.comm.former_ranks
        assert self.victim not in former, former
        # Others may have raised in init, and ended.
        assert self.case.joining or size == self.case.n - 1 + self.has_grown, former
        x = np.full(1000, 1 + self.comm.rank, np.int64)
        self.comm.all_reduce(x)
        assert (x == sum(range(1, size + 1))).all(), "the new world's sum is wrong"


def number_of(rank: int, turn: int) -> int:
    """What a rank gives `agree`: another rank has the least number in each turn."""
    return 100 * turn + (rank + turn) % 7


def disagreement(case: Kill, agreed: list[tuple[int, ...]]) -> str:
    """What is wrong with the numbers that the others' calls of `agree` returned."""
    others = [rank for rank in range(case.n) if rank != case.victim % case.n]
    for turn in range(max(map(len, agreed), default=0)):
        found = {numbers[turn] for numbers in agreed if turn < len(numbers)}
        with_victim = min(number_of(rank, turn) for rank in range(case.n))
        if len(found) > 1 or not found <= {with_victim, min(number_of(r, turn) for r in others)}:
            return f"agree returned {found} in turn {turn}"
    return ""


def work(comm: Comm | Seen, case: Kill, board: Board, address: str) -> Seen:
    if isinstance(comm, Seen):
        return comm
    if comm.rank == case.victim % case.n:
        board.note()
    return Run(comm, case, address).until_killed()


def newcomer(case: Kill, address: str) -> Seen:
    began_s = time.monotonic()
    try:
        comm = pycoll.join(address, TIMEOUT_S)
    except pycoll.PeerDiedError as error:
        is_named = error.rank == case.victim % case.n
        return Seen("join", "PeerDiedError", str(error), is_named, began_s, time.monotonic())
    return Run(comm, case, address, has_grown=True).until_killed()


@contextlib.contextmanager
def timed_joins(victim: int) -> Iterator[None]:
    """Within, init returns what the rank has seen, if it raises."""
    join = pycoll.init

    def timed(**options: Any) -> Comm | Seen:
        began_s = time.monotonic()
        try:
            return join(**options)
        except pycoll.Error as error:
            raised_s = time.monotonic()
            is_named = getattr(error, "rank", -1) == victim
            return Seen("init", type(error).__name__, str(error), is_named, began_s, raised_s)

    with mock.patch.object(pycoll, "init", timed):
        yield


def files(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(fd))
    return found


def has_come(pid: int) -> bool:
    """Whether the stopped process has connected to the store or to rank 0, or serves it."""
    own = files(pid) - files(os.getpid())
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        state, inode = line.split()[3], line.split()[9]
        if state in ("01", "0A") and f"socket:[{inode}]" in own:  # connected, listening
            return True
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, kind, state, inode, *_ = line.split()
        # The launcher's pipe to each rank is a stream; those between ranks have packets.
        is_used = kind == "0005" and (state == "03" or flags == "00010000")
        if is_used and f"socket:[{inode}]" in own:
            return True
    return False


@dataclass(frozen=True)
class Killed:
    time_s: float
    had_come: bool  # the victim had begun to join


def run(case: Kill) -> tuple[list[Any], Killed]:
    """What each rank saw, and the kill."""
    board, victim = Board(), case.victim % case.n
    address = f"127.0.0.1:{free_port()}"
    with timed_joins(victim):
        timeout_s = JOIN_S if case.joining else TIMEOUT_S
        processes = start(work, case.n, case, board, address, timeout_s=timeout_s)
    newcomers = start(newcomer, 0, case, address) if case.between == "grow" else []
    if not case.joining:
        end_s = time.monotonic() + TIMEOUT_S
        while not board.words[0] and time.monotonic() < end_s:
            time.sleep(0.0002)
    time.sleep(case.after_us / 1e6)
    pid = processes[victim].pid
    os.kill(pid, signal.SIGSTOP)  # so that the next two see it in one state
    killed = Killed(time.monotonic(), has_come(pid))
    os.kill(pid, case.signal)
    os.kill(pid, signal.SIGCONT)
    hang = threading.Timer(2 * TIMEOUT_S, kill_all, [processes + newcomers])
    hang.start()
    try:
        return end(processes) + end_newcomers(newcomers), killed
    finally:
        hang.cancel()
        hang.join()


def end_newcomers(newcomers: list[Process]) -> list[Any]:
    """What they saw. They have no world to join if the rank was killed early."""
    end_s = time.monotonic() + NEWCOMER_S
    while time.monotonic() < end_s and not all(has_ended(each.pid) for each in newcomers):
        time.sleep(0.001)
    kill_all([each for each in newcomers if not has_ended(each.pid)])
    return [seen for seen in end(newcomers) if isinstance(seen, Seen)]


def has_ended(pid: int) -> bool:
    """Whether the child has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_all(processes: list[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def judge(case: Kill, outcomes: list[Any], killed: Killed) -> Outcome:
    notices_s, where = [], ""
    if wrong := disagreement(case, [seen.agreed for seen in outcomes if isinstance(seen, Seen)]):
        return Outcome(wrong)
    for rank, seen in enumerate(outcomes):
        if rank == case.victim % case.n:
            continue
        if not isinstance(seen, Seen):
            return Outcome(f"rank {rank} hung: {seen}")
        where = seen.where
        if where == "shrink" and not seen.error:
            continue
        if where == "init" and seen.error == "TimeoutError":
            # This rank, or the dead one, had not reached the store; or it had not said its rank.
            if not killed.had_come or "could not reach the store" in seen.text:
                where = "never came"
                continue
            # Others that gave up before are missing, too.
            missing = re.match(r"ranks? ([\d, ]+) of \d+ did not join", seen.text)
            if missing and str(case.victim % case.n) in missing[1].split(", "):
                where = "came without its rank"
                continue
        notices_s.append(seen.raised_s - max(seen.began_s, killed.time_s))
        is_told = seen.error == "AbortedError" and GIVEN_UP in seen.text
        if not is_told and not (seen.error == "PeerDiedError" and seen.is_named):
            return Outcome(f"rank {rank} in {where}: {seen.error}: {seen.text}")
        if notices_s[-1] > NOTICE_S:
            return Outcome(f"rank {rank} in {where}: after {notices_s[-1]:.1f} s: {seen.text}")
    return Outcome(notices_s=tuple(notices_s), label=where)


def run_case(seed: int) -> Outcome:
    case = drawn(kills(), seed)
    before = resources()
    try:
        outcome = judge(case, *run(case))
    except AssertionError as error:
        outcome = Outcome(str(error))
    complaint = outcome.complaint or left_over(before)
    return replace(outcome, complaint=f"{complaint}\n{case}" if complaint else "")
