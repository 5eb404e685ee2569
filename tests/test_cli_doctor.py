"""`pycoll doctor` on running jobs: the late rank, and the place where it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import environment, invoke, run

import pycoll
from pycoll.observe import jobs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

PRELUDE = """
import os, sys, time
import numpy as np
import pycoll

def ready(comm):
    comm.barrier()
    with open(f"{sys.argv[1]}/rank{comm.rank}", "w") as file:
        file.write(str(os.getpid()))
"""

LATE = """
def oversleep():
    time.sleep(100)

def work(comm):
    part = comm.split(0)
    ready(part)
    if comm.rank == 1:
        oversleep()
    part.all_reduce(np.ones(7, np.float32))
"""

HEALTHY = """
def work(comm):
    ready(comm)
    time.sleep(100)
"""

CLOSED = """
def work(comm):
    comm.empty(10, "f32")
    kept = []
    for _ in range(3):
        with comm.split(0) as part:
            part.barrier()
            kept.append((part, comm.empty(10, "f32")))
    part = comm.split(0)
    part.barrier()
    if comm.rank == 1:
        part.close()
    ready(comm)
    time.sleep(100)
"""

MESSAGE = """
def work(comm):
    ready(comm)
    if comm.rank == 1:
        oversleep()
    if comm.rank == 0:
        comm.send(np.ones(100_000), 1, 6, async_op=True)
        comm.recv(np.ones(7, np.float32), 1, 5)
    if comm.rank == 2:
        comm.recv(np.ones(7, np.float32), 0, 5)

def oversleep():
    time.sleep(100)
"""

STUCK_IN_C = """
def work(comm):
    ready(comm)
    if comm.rank == 1:
        stuck_in_c()
    comm.barrier()

def stuck_in_c():
    import ctypes
    ctypes.PyDLL(None).usleep(100_000_000)  # PyDLL: the GIL is held
"""


@contextmanager
def job(
    body: str, folder: Path, n: int = 2, threads: bool = False, **more: str
) -> Iterator[list[int]]:
    """Ranks that have entered the body's `ready`; gives their pids in rank order."""
    script = folder / "job.py"
    script.write_text(
        PRELUDE + body + f"\npycoll.run_ranks(work, {n}, threads={threads}, timeout_s=60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=environment(**more),
        cwd=folder,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        files = [folder / f"rank{rank}" for rank in range(n)]
        while not all(path.exists() and path.read_text() for path in files):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield [int(path.read_text()) for path in files]
    finally:
        process.kill()  # its ranks end with it
        process.wait()


def diagnose(pid: int, *options: str) -> list[dict[str, Any]]:
    return json.loads(invoke("doctor", str(pid), "--json", "--late", "0.1", *options))


def until(pid: int, wanted: Any, *options: str) -> list[dict[str, Any]]:
    """Asks until a group is as wanted."""
    deadline = time.monotonic() + 60
    while True:
        groups = diagnose(pid, *options)
        if any(wanted(group) for group in groups):
            return groups
        assert time.monotonic() < deadline, groups
        time.sleep(0.1)


def test_doctor_names_the_late_rank_shows_its_stack_and_dumps_records(tmp_path):
    with job(LATE, tmp_path) as pids:
        groups = until(pids[0], lambda group: group["late"] == [1])
        assert [group["late"] for group in groups] == [[], [1]]  # the world, and the part
        world, part = groups
        assert part["group"].startswith(world["group"] + ".")
        assert world["job"] == part["job"] == world["group"]
        waits, late = part["ranks"]
        assert (waits["pid"], late["pid"]) == tuple(pids)
        assert (waits["state"], late["state"]) == ("waiting", "running")
        lines = (tmp_path / "job.py").read_text().splitlines()
        line = 1 + lines.index("    part.all_reduce(np.ones(7, np.float32))")
        assert waits["last"]["site"] == f"job.py:{line} in work"
        assert late["last"]["collective"] == "barrier"
        assert "in oversleep" in late["stack"] and "in work" in late["stack"]
        assert waits["stack"] is None
        text = invoke("doctor", world["job"][:8], "--late", "0.1", "--stacks")
        assert "late: rank 1" in text and "running, LATE" in text
        assert "in oversleep" in text and f"Python stacks of rank 0 (process {pids[0]})" in text
        # The job continues after each question.
        assert until(pids[0], lambda group: group["late"] == [1])
        run("doctor", str(pids[0]), "--dump", str(tmp_path / "flight"))
    assert len(list((tmp_path / "flight").glob("pycoll-*-rank_[01].json"))) == 4
    text = invoke("trace", str(tmp_path / "flight"), "-o", str(tmp_path / "trace.json"))
    assert "all_reduce" in text or "barrier" in text
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_doctor_shows_the_stack_of_a_rank_that_is_stuck_in_c(tmp_path):
    with job(STUCK_IN_C, tmp_path) as pids:
        (group,) = until(pids[1], lambda group: group["late"] == [1])
        assert "in stuck_in_c" in group["ranks"][1]["stack"]


def test_doctor_shows_rank_threads_of_one_process(tmp_path):
    with job(LATE, tmp_path, threads=True) as pids:
        assert pids[0] == pids[1]
        groups = until(pids[0], lambda group: group["late"] == [1])
        assert "in oversleep" in groups[1]["ranks"][1]["stack"]


def test_doctor_says_that_a_rank_is_stopped(tmp_path):
    body = HEALTHY.replace("time.sleep(100)", "time.sleep(100 if comm.rank else 0.2)")
    with job(body + "    comm.barrier()\n", tmp_path) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        (group,) = until(pids[0], lambda group: group["late"] == [1])
        stopped = group["ranks"][1]
        assert stopped["state"] == "stopped"
        assert stopped["stack"] is None and "kill -CONT" in stopped["why_no_stack"]


def test_doctor_finds_no_rank_late_in_a_healthy_job(tmp_path):
    with job(HEALTHY, tmp_path, n=3) as pids:
        (group,) = until(pids[2], lambda group: not group["late"])
        assert group["late"] == [] and group["failure"] is None
        assert [rank["state"] for rank in group["ranks"]] == ["running"] * 3
        assert [rank["pid"] for rank in group["ranks"]] == pids
        assert group["ranks"][0]["last"]["collective"] == "barrier"
        listed = invoke("doctor")
        assert group["job"] in listed and "is late" in listed and "late: rank" not in listed
        (group,) = diagnose(pids[0], "--stacks")
        assert all("in work" in rank["stack"] for rank in group["ranks"])


def test_doctor_names_the_rank_whose_message_is_awaited(tmp_path):
    with job(MESSAGE, tmp_path, n=3) as pids:
        (group,) = until(pids[0], lambda group: group["late"] == [1])
        waits, late, behind = group["ranks"]
        assert [r["state"] for r in group["ranks"]] == ["waiting", "running", "waiting"]
        assert "in oversleep" in late["stack"]
        sent, received = waits["messages"]
        assert (sent["kind"], sent["blocking"], sent["nbytes"]) == ("send", False, 800_000)
        assert (received["kind"], received["peer"], received["tag"]) == ("recv", 1, 5)
        assert received["finished_ns"] is None and behind["messages"][0]["peer"] == 0
        text = " ".join(invoke("doctor", str(pids[0]), "--late", "0.1").split())
        assert "late: rank 1" in text
        assert "rank 0 has a pending send(100000 f64, tag 6, to rank 1), for" in text
        assert "in recv(7 f32" in text


@pytest.mark.parametrize("threads", [False, True])
def test_doctor_shows_nothing_of_what_all_ranks_have_closed(tmp_path, threads):
    with job(CLOSED, tmp_path, threads=threads) as pids:
        groups = diagnose(pids[0])
        assert [group["group"].partition(".")[2] for group in groups] == ["", "3-0"]
        assert [rank["state"] for rank in groups[1]["ranks"]] == ["running", "left"]
        assert groups[1]["late"] == []


def test_doctor_sends_no_signal_where_stacks_are_off(tmp_path):
    with job(HEALTHY, tmp_path, PYCOLL_DOCTOR_SIGNAL="off") as pids:
        (group,) = diagnose(pids[0], "--stacks")
        for rank in group["ranks"]:
            assert rank["stack"] is None and "PYCOLL_DOCTOR_SIGNAL" in rank["why_no_stack"]
        assert [rank["state"] for rank in diagnose(pids[0])[0]["ranks"]] == ["running"] * 2


def test_doctor_says_why_it_finds_nothing():
    mine = invoke("doctor", str(os.getppid()), status=2)
    assert "has no communicator of pycoll" in mine
    assert "no job that begins with nosuchjob" in invoke("doctor", "nosuchjob", status=2)
    assert "no process 999999999" in invoke("doctor", "999999999", status=2)


@pytest.mark.slow
def test_doctor_sees_a_communicator_of_more_than_64_ranks():
    def work(comm: pycoll.Communicator) -> tuple[list[int], list[str]]:
        comm.barrier()
        found = jobs.scan() if comm.rank == 0 else jobs.Scan()
        comm.barrier()
        mine = [group for group in found.groups if os.getpid() in group.pids]
        return [group.size for group in mine], found.unreadable

    sizes, unreadable = pycoll.run_ranks(work, 66)[0]
    assert sizes == [66]
    assert unreadable == []


def test_doctor_of_another_version_says_so(tmp_path):
    """A memfd with our magic number and another version."""
    layout = tmp_path / "memory"
    layout.write_bytes((0x6C6C6F6379702121).to_bytes(8, "little") + (99).to_bytes(8, "little"))
    with layout.open("ab") as file:
        file.truncate(1 << 16)
    with pytest.raises(pycoll.UsageError, match="another version of pycoll .layout 99"):
        pycoll._core.SegmentView(str(layout))
    layout.write_bytes(bytes(1 << 16))
    with pytest.raises(pycoll.UsageError, match="is not the shared memory of"):
        pycoll._core.SegmentView(str(layout))
