"""Jobs whose last rank is hostile, and frames that it sends, by seed.

The other ranks are forked, share this host, and report how their calls ended and whether memory
outside their receives has changed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import select
import socket
import struct
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from hostile_rank import (
    ANNOUNCE,
    EAGER,
    F32,
    FIELDS,
    HEADER,
    KINDS,
    PART,
    PULL,
    TAKEN,
    U8,
    HostileRank,
    message,
)
from namespaces import TOKEN

import pycoll

NUM_BYTES = 1_200_000
_FILL = 90
_GAP = 4096
_NUM_FLOATS = 200_000
_END_S = 60.0


class Arena:
    """Arrays between bytes that no frame may change."""

    def __init__(self, *sizes: int) -> None:
        self.bytes = np.full(sum(sizes) + (len(sizes) + 1) * _GAP, _FILL, np.uint8)
        self.may_change = np.zeros(self.bytes.size, bool)
        self.arrays = []
        at = _GAP
        for size in sizes:
            self.arrays.append(self.bytes[at : at + size])
            self.may_change[at : at + size] = True
            at += size + _GAP

    def is_intact(self) -> bool:
        return bool((self.bytes[~self.may_change] == _FILL).all())


def call(comm: pycoll.Communicator, which: str, arena: Arena, sent: np.ndarray) -> None:
    """The call of a rank that is not hostile; "mixed" has pending operations of all kinds."""
    last = comm.size - 1
    large, small, any_bytes = arena.arrays
    x = large.view(np.float32)
    if which == "recv":
        comm.recv(x, last, tag=0, async_op=True).wait()
    elif which == "all_reduce":
        comm.all_reduce(x)
    else:
        works = [comm.recv(small.view(np.float32), last, tag=1, async_op=True)]
        works.append(comm.send(sent, last, tag=2, async_op=True))
        works.append(comm.send(sent[:10], last, tag=2, async_op=True))
        works.append(comm.all_reduce(np.ones(1000), async_op=True))
        comm.recv(x, last, tag=0)
        comm.recv_any(any_bytes, tag=3)
        for work in works:
            work.wait()


def run_rank(which: str, env: dict[str, str], pipe: Connection) -> None:
    """A rank that is not hostile: sends how its call ended, and whether the memory is intact."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(env)
    arena, sent = Arena(NUM_BYTES, 400, 10), np.ones(_NUM_FLOATS)
    report: dict[str, Any] = {}
    try:
        comm = pycoll.init(timeout_s=10)
        call(comm, which, arena, sent)
    except pycoll.Error as error:
        report = {"error": type(error).__name__, "rank": getattr(error, "rank", -1)}
        report["text"] = str(error)
    report["guards"] = arena.is_intact() and bool((sent == 1).all())
    pipe.send(report)
    pipe.close()
    os._exit(0)


class Job:
    """A job whose last rank is hostile and whose other ranks share this host."""

    def __init__(self, which: str, size: int = 2) -> None:
        # Bound without listening, so that the kernel gives the port to no other program.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port, self.size = self._reserved.getsockname()[1], size
        env = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "PYCOLL_IFNAME": "lo",
            "PYCOLL_TOKEN": TOKEN,
            "PYCOLL_SILENCE_S": "3",
        }
        fork = multiprocessing.get_context("fork")
        self.ranks = []
        for rank in range(size - 1):
            pipe, theirs = fork.Pipe(duplex=False)
            args = (which, {**env, "RANK": str(rank)}, theirs)
            process = fork.Process(target=run_rank, args=args)
            process.start()
            theirs.close()
            self.ranks.append((process, pipe))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._reserved.close()
        for process, pipe in self.ranks:
            process.kill()
            process.join()
            process.close()
            pipe.close()

    def attack(self, attack: Callable[[HostileRank], None]) -> list[dict[str, Any]]:
        """The reports of the ranks; a rank that has crashed or hangs has "crash"."""
        with contextlib.closing(HostileRank(self.port, TOKEN, self.size)) as hostile:
            # The connection may end at any frame.
            with contextlib.suppress(ConnectionError, EOFError):
                attack(hostile)
            return [self._report(*rank) for rank in self.ranks]

    @staticmethod
    def _report(process: Any, pipe: Connection) -> dict[str, Any]:
        if not pipe.poll(_END_S):
            return {"crash": f"no report within {_END_S:g} s"}
        try:
            report: dict[str, Any] = pipe.recv()
        except EOFError:
            process.join()
            return {"crash": f"exit code {process.exitcode}"}
        process.join()
        return report if process.exitcode == 0 else {"crash": f"exit code {process.exitcode}"}


def complaint_about(report: dict[str, Any], hostile: int) -> str:
    """What is wrong with how a rank ended; empty: nothing."""
    if "crash" in report:
        return f"a rank crashed: {report['crash']}"
    if not report["guards"]:
        return "bytes outside the receives have changed"
    if "error" in report and f"rank {hostile}" not in report["text"]:
        return f"the error does not name rank {hostile}: {report['error']}: {report['text']}"
    return ""


class FrameSource:
    """Frames that are valid or nearly so, from a rank that remembers what it has sent."""

    def __init__(self, seed: int, group: int) -> None:
        self._random = random.Random(seed)
        self._group = group
        self._lines = 0
        self._slots = [0, 0]

    def next(self) -> bytes:
        choose = self._random
        kind = choose.choice((*KINDS, "slot", "lines", "lines", "lines"))
        values = {"kind": KINDS.index(kind), "group": self._group, "word": self._lines}
        body = b""
        if kind == "slot":
            values["protocol"] = choose.randrange(2)
            values["sequence"] = self._slots[values["protocol"]] + 1
            body = choose.randbytes(choose.choice((0, 1, 500, 4000)))
        if kind == "mail":
            values["word"] = values["more"] = 0
        if kind == "lines":
            body = self._message()
        if kind in ("ask", "tell", "failure"):
            body = choose.randbytes(choose.randrange(200))
        values["nbytes"] = len(body)
        if choose.random() < 0.2:
            values[choose.choice(FIELDS[1:])] = choose.choice((1, 2, 64, 200, 2**16 - 1))
        values["protocol"] = values.get("protocol", 0) % 256
        if kind == "lines":
            self._lines += len(body) // 64
        if kind == "slot":
            self._slots[values["protocol"] % 2] += 1
        return HEADER.pack(*(values.get(name, 0) for name in FIELDS)) + body

    def _message(self) -> bytes:
        choose = self._random
        what = choose.choice((EAGER, EAGER, ANNOUNCE, TAKEN, PULL, PART))
        nbytes = choose.choice((10, 400, 400, 2000, 1 << 20, 1 << 46))
        num_lines = 1
        if what == PART or (what == EAGER and nbytes > 40) or choose.random() < 0.1:
            num_lines = 1 + (nbytes + 63) // 64 % 1000
        ref = (choose.randrange(4), choose.randrange(4), 0, choose.choice((0, 64, 1 << 46)))
        head = message(what, nbytes, num_lines, choose.randrange(4), ref, choose.choice((U8, F32)))
        return head + bytes(64 * (num_lines - 1))


def frames(seed: int, most: int) -> Callable[[HostileRank], Iterator[int]]:
    """An attack of at most `most` frames, which yields for each frame that was sent.

    Then it sends no more, so that a rank which has found nothing wrong does not wait for long.
    """

    def attack(hostile: HostileRank) -> Iterator[int]:
        source = FrameSource(seed, hostile.group)
        for number in range(most):
            hostile.send_bytes(source.next())
            yield number
            drain(hostile)
        hostile.sockets[0].shutdown(socket.SHUT_WR)

    return attack


def drain(hostile: HostileRank) -> None:
    """Reads what has come from rank 0. Raises EOFError if rank 0 has closed the connection."""
    connection = hostile.sockets[0]
    while select.select([connection], [], [], 0)[0]:
        if not connection.recv(1 << 16):
            raise EOFError


def ask_for_parts(hostile: HostileRank) -> int:
    """Announces a message that fits the receive; the id under which rank 0 wants its parts."""
    hostile.send("lines", message(ANNOUNCE, NUM_BYTES, ref=(1, 0, 0, 0), dtype=F32))
    return int(struct.unpack_from("<Q", hostile.receive_lines(), 32)[0])
