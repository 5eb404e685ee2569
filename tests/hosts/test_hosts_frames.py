"""Invalid frames of a rank of another host end its connection and nothing else.

tests/cpp/frame_check.cc sends many more, to the same code without a job around it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
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
from namespaces import TOKEN, free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

NUM_BYTES = 1_200_000
# The ranks of the host that is not hostile. Each reports how its call ended, and whether the bytes
# around its array are as they were.
JOB = f"""
import json, resource, sys
import numpy as np, pycoll
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
comm = pycoll.init(timeout_s=10)
arena = np.full({NUM_BYTES} + 8192, 90, np.uint8)
x = arena[4096:-4096].view(np.float32)
last = comm.size - 1
report = {{}}
try:
    if sys.argv[1] == "recv":
        comm.recv(x, last, tag=0, async_op=True).wait()
    elif sys.argv[1] == "all_reduce":
        comm.all_reduce(x)
    else:
        works = [comm.recv(x[:100], last, tag=1, async_op=True)]
        works.append(comm.send(np.ones(200_000), last, tag=2, async_op=True))
        works.append(comm.send(np.ones(10), last, tag=2, async_op=True))
        works.append(comm.all_reduce(np.ones(1000), async_op=True))
        comm.recv(x, last, tag=0)
        comm.recv_any(np.empty(10, np.uint8), tag=3)
        for work in works:
            work.wait()
except pycoll.Error as error:
    report = {{"error": type(error).__name__, "rank": getattr(error, "rank", -1)}}
    report["text"] = str(error)
report["guards"] = bool((arena[:4096] == 90).all() and (arena[-4096:] == 90).all())
print(json.dumps(report))
"""


class Job:
    """A job whose last rank is hostile and whose other ranks share this host."""

    def __init__(self, call: str, size: int = 2) -> None:
        self.port, self.size = free_port(), size
        env = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "PYCOLL_IFNAME": "lo",
            "PYCOLL_TOKEN": TOKEN,
            "PYCOLL_SILENCE_S": "3",
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, call],
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size - 1)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()

    def attack(self, attack: Callable[[HostileRank], None]) -> list[dict[str, Any]]:
        """The reports of the ranks; a rank that has crashed has "crash"."""
        with contextlib.closing(HostileRank(self.port, TOKEN, self.size)) as hostile:
            # The connection may end at any frame.
            with contextlib.suppress(ConnectionError, EOFError):
                attack(hostile)
            return [self._report(rank) for rank in self.ranks]

    @staticmethod
    def _report(rank: subprocess.Popen[str]) -> dict[str, Any]:
        output, _ = rank.communicate(timeout=60)
        if rank.returncode != 0:
            return {"crash": rank.returncode, "text": output[-1000:]}
        return dict(json.loads(output.splitlines()[-1]))


def ask_for_parts(hostile: HostileRank) -> int:
    """Announces a message that fits the receive; the id under which rank 0 wants its parts."""
    hostile.send("lines", message(ANNOUNCE, NUM_BYTES, ref=(1, 0, 0, 0), dtype=F32))
    return int(struct.unpack_from("<Q", hostile.receive_lines(), 32)[0])


def send_part(hostile: HostileRank, offset: int) -> None:
    ref = (1, ask_for_parts(hostile), 0, offset % 2**64)
    hostile.send("lines", message(PART, 64, lines=2, ref=ref) + b"A" * 64, word=1)


INVALID: dict[str, Callable[[HostileRank], None]] = {
    "slot without a payload": lambda h: h.send("slot", protocol=200, sequence=1),
    "lines without a payload": lambda h: h.send("lines"),
    "message of 2^46 bytes": lambda h: h.send("lines", message(EAGER, 1 << 46, tag=7)),
    "more bytes than lines": lambda h: h.send("lines", message(EAGER, NUM_BYTES, dtype=F32)),
    "part far behind the array": lambda h: send_part(h, 1 << 46),
    "part before the array": lambda h: send_part(h, -64),
    "unknown kind": lambda h: h.send(99),
    "no frame": lambda h: h.send_bytes(b"\xff" * 4096),
}


def named(report: dict[str, Any], rank: int) -> bool:
    """Whether the report is of an error that names this rank, and the memory is as it was."""
    return (
        report.get("error") == "PeerDiedError"
        and report["rank"] == rank
        and f"rank {rank} on host hostile sent an invalid frame" in report["text"]
        and report["guards"]
    )


def test_invalid_frame_ends_its_connection_and_names_the_sender():
    wrong = []
    with contextlib.ExitStack() as stack:
        jobs = {what: stack.enter_context(Job("recv")) for what in INVALID}
        for what, job in jobs.items():
            (report,) = job.attack(INVALID[what])
            wrong += [f"{what}: {report}"] * (not named(report, 1))
    assert not wrong, "\n".join(wrong)


def test_invalid_frame_to_one_rank_is_reported_by_all():
    with Job("all_reduce", size=3) as job:
        reports = job.attack(lambda hostile: hostile.send("lines", peer=1))
    assert all(named(report, 2) for report in reports), reports


def random_frame(source: random.Random, group: int, lines: int, slots: list[int]) -> bytes:
    """A frame that is valid or nearly so, from a rank that has sent so many lines and slots."""
    kind = source.choice((*KINDS, "slot", "lines", "lines", "lines"))
    values = {"kind": KINDS.index(kind), "group": group, "word": lines}
    body = b""
    if kind == "slot":
        values["protocol"] = source.randrange(2)
        values["sequence"] = slots[values["protocol"]] + 1
        body = source.randbytes(source.choice((0, 1, 500, 4000)))
    if kind == "lines":
        what = source.choice((EAGER, ANNOUNCE, TAKEN, PULL, PART))
        nbytes = source.choice((10, 400, 2000, 1 << 20, 1 << 46))
        num_lines = source.choice((1, 1, 1 + (nbytes + 63) // 64 % 1000))
        ref = (source.randrange(4), source.randrange(4), 0, source.choice((0, 64, 1 << 46)))
        dtype = source.choice((U8, F32))
        body = message(what, nbytes, num_lines, source.randrange(4), ref, dtype)
        body += bytes(64 * (num_lines - 1))
    if kind in ("ask", "tell", "failure"):
        body = source.randbytes(source.randrange(200))
    values["nbytes"] = len(body)
    if source.random() < 0.2:
        values[source.choice(FIELDS[1:])] = source.choice((1, 2, 64, 200))
    return HEADER.pack(*(values.get(name, 0) for name in FIELDS)) + body


def random_attack(seed: int) -> Callable[[HostileRank], None]:
    def attack(hostile: HostileRank) -> None:
        source = random.Random(seed)
        lines, slots = 0, [0, 0]
        for _ in range(60):
            frame = random_frame(source, hostile.group, lines, slots)
            if frame[0] == KINDS.index("lines"):
                lines += (len(frame) - HEADER.size) // 64
            if frame[0] == KINDS.index("slot"):
                slots[frame[1] % 2] += 1
            hostile.send_bytes(frame)

    return attack


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_frames_end_no_process_and_change_no_other_memory():
    first = int(os.environ.get("PYCOLL_TEST_SEED", "1"))
    print("seed", first)
    wrong = []
    for seed in range(first, first + 60, 6):
        with contextlib.ExitStack() as stack:
            jobs = {one: stack.enter_context(Job("mixed")) for one in range(seed, seed + 6)}
            for one, job in jobs.items():
                (report,) = job.attack(random_attack(one))
                if "crash" in report or not report["guards"]:
                    wrong.append(f"PYCOLL_TEST_SEED={one}: {report}")
    assert not wrong, "\n".join(wrong)
