"""A system call of one rank fails: an error that says so or right results, on all ranks.

strace lets the N-th call of one kind fail, or all from the N-th on, in one of 2 to 4 processes that
join, split, reduce, send, share arrays, shrink, agree and close. No rank may crash or hang, return
a wrong value, raise anything but an error of pycoll, OSError or MemoryError, or leave anything.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal  # now: a system call of its import may not fail

# Imported before the fault: how Python reports a module that it cannot read is not pycoll's.
import pycoll
import pycoll.elastic.resize
import pycoll.elastic.value_agreement
from injections import Outcome
from pycoll.launch.processes import World

CASES = 600
FEW = (1, 2, 3, 4, 5, 6)

TIMEOUT_S = 2.0  # of each operation
CASE_S = 30.0  # after which a rank hangs; shrink waits for up to twice its timeout
_RESULT_BYTES = 1 << 16

# System calls that fail, and the errors that a kernel gives.
CALLS: dict[str, tuple[str, ...]] = {
    "accept4": ("EMFILE", "ENOMEM", "ECONNABORTED", "EINTR"),
    "bind": ("EADDRINUSE", "ENOMEM"),
    "clone3": ("EAGAIN", "ENOMEM"),
    "close": ("EINTR", "EIO"),
    "connect": ("ECONNREFUSED", "EAGAIN", "EINTR"),
    "epoll_create1": ("EMFILE", "ENOMEM"),
    "epoll_ctl": ("ENOMEM", "ENOSPC"),
    "eventfd2": ("EMFILE", "ENOMEM"),
    "fcntl": ("EMFILE", "EINTR"),
    "ftruncate": ("ENOMEM", "EINTR"),
    "getpeername": ("ENOBUFS",),
    "getrandom": ("EINTR", "ENOSYS"),
    "getsockname": ("ENOBUFS",),
    "getsockopt": ("ENOBUFS", "EINVAL"),
    "ioctl": ("ENOTTY", "EINVAL"),
    "listen": ("EADDRINUSE", "ENOMEM"),
    "madvise": ("ENOMEM", "EAGAIN"),
    "memfd_create": ("EMFILE", "ENOMEM"),
    "mmap": ("ENOMEM", "EAGAIN"),
    "mremap": ("ENOMEM", "EAGAIN"),
    "munmap": ("ENOMEM",),
    "newfstatat": ("ENOMEM", "EACCES"),
    "openat": ("EMFILE", "ENOMEM", "ENFILE"),
    "pidfd_open": ("EMFILE", "ENOSYS"),
    "poll": ("ENOMEM", "EINTR"),
    "ppoll": ("ENOMEM", "EINTR"),
    "process_vm_readv": ("EPERM", "ENOMEM", "ESRCH"),
    "pwrite64": ("ENOSPC", "ENOMEM"),
    "read": ("EIO", "EINTR"),
    "recvfrom": ("ENOMEM", "ECONNRESET", "EINTR"),
    "recvmsg": ("ENOMEM", "ECONNRESET", "EINTR"),
    "sched_getaffinity": ("EPERM", "ESRCH"),
    "sendmsg": ("ENOBUFS", "EPIPE", "EINTR"),
    "sendto": ("ENOBUFS", "EPIPE", "EINTR"),
    "setsockopt": ("ENOMEM", "ENOBUFS"),
    "shutdown": ("ENOTCONN", "ENOBUFS"),
    "socket": ("EMFILE", "ENOBUFS"),
    "socketpair": ("EMFILE", "ENOMEM"),
    "write": ("ENOSPC", "EINTR"),
}
# Others that the ranks make, and why they do not fail here.
NOT_INJECTED = {
    "brk": "glibc takes memory by mmap instead",
    "clock_nanosleep": "fails by EINTR alone, which glibc's and Python's callers expect",
    "epoll_wait": "no kernel fails it for a valid descriptor, except by EINTR",
    "futex": "glibc ends the process: 'The futex facility returned an unexpected error code'",
    "mprotect": "in glibc's pthread_create and malloc alone, which undo what they began",
    "rseq": "glibc ends the process if a thread cannot register",
    "rt_sigaction": "no kernel fails it for a valid signal",
    "rt_sigprocmask": "no kernel fails it for a valid mask, and glibc asserts that",
    "sched_yield": "no kernel fails it",
    "set_robust_list": "glibc ignores its result",
    "tgkill": "raises a signal that ends the process anyway",
}


def why_not() -> str:
    """Why no case can run on this machine; empty if they can."""
    if not shutil.which("strace"):
        return "system calls that fail need strace"
    traced = subprocess.Popen(["sleep", "1"])
    try:
        command = ["strace", "-qq", "-o", "/dev/null", "-e", "trace=none", "-p", str(traced.pid)]
        tried = subprocess.run(command, capture_output=True, text=True)
    finally:
        traced.wait()
    return "" if tried.returncode == 0 else f"strace may not trace: {tried.stderr.strip()}"


# What the ranks do. The functions check each value.

Comm = pycoll.Communicator


def same(got: Any, expected: Any) -> None:
    assert_array_equal(got, expected)


def ranks_sum(comm: Comm) -> int:
    return comm.size * (comm.size - 1) // 2


def do_nothing(comm: Comm) -> None:
    same(comm.all_reduce(np.full(3, comm.rank)), np.full(3, ranks_sum(comm)))


def do_split(comm: Comm) -> None:
    for i in range(4):
        part = comm.split((comm.rank + i) % 2)
        assert part is not None
        do_nothing(part)
        if i % 2:
            part.close()
    pair = comm.group([1, 0])
    if pair is not None:
        do_nothing(pair)


def do_collectives(comm: Comm) -> None:
    for count in (1, 1000, 1 << 18):
        base = np.arange(count, dtype=np.float64) % 97
        own, total = base + comm.rank, base * comm.size + ranks_sum(comm)
        same(comm.all_reduce(own.copy()), total)
        same(comm.all_gather(own).reshape(comm.size, count)[-1], base + comm.size - 1)
        work = comm.all_reduce(own.copy(), async_op=True)
        same(comm.broadcast(own.copy(), root=1), base + 1)
        same(work.wait(), total)


def do_messages(comm: Comm) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (1, 1000, 1 << 18):
        got = np.zeros(count)
        sent = comm.send(np.full(count, float(comm.rank)), right, async_op=True)
        received = comm.recv(got, left, async_op=True)
        received.wait()
        sent.wait()
        same(got, np.full(count, left))
    got = np.zeros(1 << 18)
    if comm.rank == 0:
        comm.send(np.full(1 << 18, 7.0), 1)
    elif comm.rank == 1:
        comm.recv(got, 0)
        same(got, np.full(1 << 18, 7.0))


def do_arrays(comm: Comm) -> None:
    own = comm.register(np.zeros(1 << 18))
    plain = np.zeros(1 << 16)
    for i in range(12):
        shared = comm.empty(1 << 16, np.float64)
        for x in (shared, own, plain):
            x[...] = comm.rank + i
            comm.all_reduce(x, out=x)
            same(x, np.full(x.shape, ranks_sum(comm) + i * comm.size))
    comm.unregister(own)


def do_shrink(comm: Comm) -> None:
    new = comm.shrink(TIMEOUT_S)
    same(new.former_ranks, range(comm.size) if new.size == comm.size else new.former_ranks)
    same(new.all_reduce(np.full(3, new.rank)), np.full(3, ranks_sum(new)))
    new.close()


def do_agree(comm: Comm) -> None:
    for i in range(3):
        # A rank that the system says is dead, or cannot be reached, counts as dead.
        assert i <= comm.agree(i + comm.rank, "max") < i + comm.size


def do_close(comm: Comm) -> None:
    """Closes with an operation and messages that the others wait for in part."""
    comm.all_reduce(np.ones(1 << 16), async_op=True).wait()
    part = comm.split(0)
    assert part is not None
    part.close()


SCENES: dict[str, Callable[[Comm], None]] = {
    "join": do_nothing,
    "split": do_split,
    "collectives": do_collectives,
    "messages": do_messages,
    "arrays": do_arrays,
    "shrink": do_shrink,
    "agree": do_agree,
    "close": do_close,
}


# The calls that each scene makes, of those in CALLS: another one would not fail.
_ALWAYS = "close epoll_ctl ioctl madvise mmap munmap newfstatat openat read recvfrom sendto"
_CONNECTING = f"{_ALWAYS} accept4 connect getpeername getrandom getsockname getsockopt socket"
_FORMING = (
    f"{_ALWAYS} accept4 bind connect fcntl ftruncate getrandom getsockopt listen memfd_create "
    "pidfd_open poll ppoll pwrite64 recvmsg sched_getaffinity sendmsg socket"
)
_JOINING = (
    f"{_FORMING} clone3 epoll_create1 eventfd2 getpeername getsockname setsockopt shutdown "
    "socketpair write"
)
MADE: dict[str, str] = {
    "join": _JOINING,
    "split": _FORMING,
    "collectives": f"{_ALWAYS} clone3 poll",
    "messages": f"{_ALWAYS} clone3 poll process_vm_readv",
    "arrays": f"{_ALWAYS} mremap poll",
    "shrink": _JOINING,
    "agree": f"{_CONNECTING} setsockopt",
    "close": f"{_FORMING} clone3",
}


@dataclass(frozen=True)
class Case:
    n: int
    victim: int
    scene: str
    call: str
    error: str
    when: str  # of strace: "3" is the third call, "3+" also all later ones

    @classmethod
    def drawn(cls, seed: int) -> Case:
        rng = random.Random(seed)
        scene = rng.choice([*SCENES])
        call = rng.choice(MADE[scene].split())
        error = rng.choice(CALLS[call])
        # No kernel interrupts a call for ever.
        more = rng.choice(["", "", "+"]) if error != "EINTR" else ""
        return cls(
            n=(n := rng.randint(2, 4)),
            victim=rng.choice([0, rng.randrange(n)]),
            scene=scene,
            call=call,
            error=error,
            when=f"{rng.choice([1, 1, 1, 1, 2, 3, 5, 8])}{more}",
        )

    def __str__(self) -> str:
        where = f"rank {self.victim} of {self.n} in {self.scene}"
        return f"{self.call}={self.error} (call {self.when}) of {where}"


class RankProcess:
    """A forked rank, which waits for `go` and leaves its result in shared memory.

    Both without a system call that a case lets fail.
    """

    _READY, _GO, _RESULT = 0, 1, 8

    def __init__(self, case: Case, rank: int, world: World, log: Path) -> None:
        self.shared = mmap.mmap(-1, _RESULT_BYTES)
        self.status = 0
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(world.environment(rank))
            errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            faulthandler.enable()
            faulthandler.dump_traceback_later(CASE_S - 2)
            self._run(case)
            os._exit(0)

    def _run(self, case: Case) -> None:
        outcome = ["returned", "", ""]
        try:
            comm = None if case.scene == "join" else pycoll.init(timeout_s=TIMEOUT_S)
            self.shared[self._READY] = 1
            while not self.shared[self._GO]:
                time.sleep(0.001)
            comm = comm or pycoll.init(timeout_s=TIMEOUT_S)
            SCENES[case.scene](comm)
            comm.close()
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            text = "".join(traceback.format_exception(error))[-4000:]
            outcome = [",".join(names), str(error), text]
        data = json.dumps(outcome).encode()
        self.shared[self._RESULT : self._RESULT + len(data)] = data

    def is_ready(self) -> bool:
        return bool(self.shared[self._READY]) or self.has_ended()

    def go(self) -> None:
        self.shared[self._GO] = 1

    def has_ended(self) -> bool:
        if self.pid:
            pid, self.status = os.waitpid(self.pid, os.WNOHANG)
            self.pid = 0 if pid else self.pid
        return not self.pid

    def kill(self) -> None:
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
            self.pid = 0

    def outcome(self) -> list[str] | None:
        data = self.shared[self._RESULT :].rstrip(b"\0")
        return json.loads(data) if data else None


def run_case(seed: int) -> Outcome:
    case = Case.drawn(seed)
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        complaint, hit = _run(case, Path(folder))
    left = {name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name}
    if left and not complaint:
        complaint = f"left in /dev/shm: {left}"
    return Outcome(complaint and f"{case}: {complaint}", label="hit" if hit else "not reached")


def _run(case: Case, folder: Path) -> tuple[str, bool]:
    world = World(case.n)
    ranks = [RankProcess(case, rank, world, folder / "errors") for rank in range(case.n)]
    world.close()
    tracer = None
    try:
        _wait_until(lambda: all(rank.is_ready() for rank in ranks))
        tracer = _attach(case, ranks[case.victim].pid, folder / "trace")
        for rank in ranks:
            rank.go()
        hangs = not _wait_until(lambda: all([rank.has_ended() for rank in ranks]))
        running = [number for number, rank in enumerate(ranks) if not rank.has_ended()]
    finally:
        for rank in ranks:
            rank.kill()
        if tracer is not None:
            tracer.wait()
    hit = "(INJECTED)" in (folder / "trace").read_text(errors="replace")
    errors = (folder / "errors").read_text(errors="replace")[-3000:]
    if hangs:
        return f"ranks {running} hang: {errors}", hit
    for number, rank in enumerate(ranks):
        if why := _judge(rank, hit):
            return f"rank {number} {why}\n{errors}", hit
    return "", hit


def _attach(case: Case, pid: int, log: Path) -> subprocess.Popen[str]:
    inject = f"inject={case.call}:error={case.error}:when={case.when}"
    command = ["strace", "-f", "-o", str(log), "-e", f"trace={case.call}", "-e", "signal=none"]
    tracer = subprocess.Popen(
        [*command, "-e", inject, "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    while line := tracer.stderr.readline():
        if "attached" in line:
            break
    tracer.stderr.close()  # strace ignores that it cannot report later threads
    return tracer


def _judge(rank: RankProcess, hit: bool) -> str:
    if os.WIFSIGNALED(rank.status):
        return f"was ended by {signal.Signals(os.WTERMSIG(rank.status)).name}"
    if (outcome := rank.outcome()) is None:
        return f"left no result, exit status {rank.status}"
    kinds, text, details = outcome[0].split(","), outcome[1], outcome[2]
    if kinds == ["returned"]:
        return ""
    if not hit:
        return f"raised without a fault: {details}"
    if not {"Error", "OSError", "MemoryError"} & set(kinds):
        return f"raised {kinds[0]}: {details}"
    if " " not in text and "MemoryError" not in kinds:
        return f"raised {kinds[0]} without a sentence: {details}"
    return ""


def _wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + CASE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
