"""run_ranks: results in rank order, errors with their rank, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from processes import child_pids, wait_for_pids, wait_until_gone

import pycoll
from pycoll import PeerDiedError, UsageError, run_ranks
from pycoll.launch import RankError
from pycoll.launch.remote_hosts import host_names

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

ROOT = Path(pycoll.__file__).parents[1]
both = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


class TwoArguments(Exception):
    """Cannot be unpickled: its constructor takes one argument more than it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left():
    """Fails the test when it leaves a process or a file descriptor."""
    run_ranks(lambda comm: None, 1)  # whatever is opened once and for all
    processes, fds = child_pids(), num_fds()
    yield
    assert child_pids() == processes
    assert num_fds() == fds


@both
@pytest.mark.parametrize("n", [1, 2, 5])
def test_run_ranks_passes_arguments_and_returns_results_in_rank_order(threads, n):
    offset = random.randrange(1000)

    def add(comm, first, *, second):
        return comm.rank, comm.size, first + second + offset

    results = run_ranks(add, n, 10, second=100, threads=threads)
    assert results == [(rank, n, 110 + offset) for rank in range(n)]


def test_run_ranks_processes_are_processes_and_threads_are_threads():
    pids = run_ranks(lambda comm: os.getpid(), 3)
    assert len({os.getpid(), *pids}) == 4
    places = run_ranks(lambda comm: (os.getpid(), threading.current_thread()), 3, threads=True)
    assert {pid for pid, _ in places} == {os.getpid()}
    assert len({thread for _, thread in places}) == 3


def test_run_ranks_results_of_50_megabytes_arrive_whole(nothing_left):
    count = 50_000_000
    results = run_ranks(lambda comm: np.full(count, comm.rank + 1, np.uint8), 2)
    for rank, x in enumerate(results):
        assert x.size == count
        assert (x == rank + 1).all()


@both
def test_run_ranks_error_keeps_its_type_and_names_the_rank(threads, nothing_left):
    def fail(comm):
        if comm.rank == 1:
            raise KeyError("the lost key")
        comm.barrier()

    with pytest.raises(KeyError, match="the lost key") as caught:
        run_ranks(fail, 3, threads=threads)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError)
    assert "rank 1 of 3" in str(cause)
    assert 'raise KeyError("the lost key")' in str(cause)


@both
def test_run_ranks_error_of_the_first_rank_wins_over_echoes(threads):
    def fail(comm):
        if comm.rank == 2:
            time.sleep(0.1)
            raise ZeroDivisionError("root cause")
        comm.all_reduce(np.ones(10))

    with pytest.raises(ZeroDivisionError, match="root cause"):
        run_ranks(fail, 3, threads=threads)


@both
def test_run_ranks_return_errors_puts_them_in_place(threads):
    def fail(comm):
        if comm.rank % 2:
            raise ValueError(f"rank {comm.rank} is odd")
        return comm.rank

    results = run_ranks(fail, 4, threads=threads, return_errors=True)
    assert [results[0], results[2]] == [0, 2]
    assert [str(error) for error in results[1::2]] == ["rank 1 is odd", "rank 3 is odd"]


def test_run_ranks_error_that_cannot_be_pickled_becomes_an_error_that_names_it():
    def fail(comm):
        raise TwoArguments("one", "two")

    with pytest.raises(pycoll.Error, match="rank 0 of 1 raised TwoArguments: one"):
        run_ranks(fail, 1)


def test_run_ranks_result_that_cannot_be_pickled_is_an_error_of_the_rank():
    with pytest.raises(Exception, match="pickle") as caught:
        run_ranks(lambda comm: lambda: None, 2)
    assert "rank" in str(caught.value.__cause__)


@both
def test_run_ranks_sys_exit_in_a_rank_does_not_end_the_caller(threads):
    with pytest.raises(pycoll.Error, match="rank 0 of 1 raised SystemExit: 3"):
        run_ranks(lambda comm: sys.exit(3), 1, threads=threads)


def test_run_ranks_rank_that_exits_early_is_named():
    with pytest.raises(pycoll.Error, match="rank 0 of 1 exited with status 4"):
        run_ranks(lambda comm: os._exit(4), 1)


def test_run_ranks_rank_killed_raises_peer_died_with_rank_and_signal(nothing_left):
    def die(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(PeerDiedError, match="rank 1 of 3 was killed by SIGKILL") as caught:
        run_ranks(die, 3)
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)


def test_run_ranks_rank_killed_is_reported_by_the_survivors():
    def die(comm):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    errors = run_ranks(die, 3, return_errors=True)
    assert [type(error) for error in errors] == [PeerDiedError] * 3
    assert [error.rank for error in errors] == [0, 0, 0]


def test_run_ranks_rank_that_hangs_after_a_failure_is_ended(monkeypatch, nothing_left):
    monkeypatch.setattr("pycoll.launch.rank_functions._GRACE_S", 0.3)

    def fail_or_hang(comm):
        if comm.rank == 0:
            raise ValueError("first")
        time.sleep(1000)

    with pytest.raises(ValueError, match="first"):
        run_ranks(fail_or_hang, 3)


def test_run_ranks_what_a_killed_rank_started_is_ended_too(tmp_path: Path):
    def start_and_fail(comm):
        sleeper = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(sleeper.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerDiedError):
        run_ranks(start_and_fail, 1)
    wait_until_gone([int((tmp_path / "pid").read_text())])


def test_run_ranks_without_ranks_is_refused():
    for n in (0, -1):
        with pytest.raises(UsageError, match=f"n is {n}, expected a whole number"):
            run_ranks(lambda comm: None, n)


def test_run_ranks_leaves_random_numbers_of_the_caller_alone():
    random.seed(7)
    expected = random.Random(7).random()
    run_ranks(lambda comm: random.random(), 2)
    assert random.random() == expected


def test_run_ranks_does_not_write_buffered_output_twice():
    script = """
        import sys, pycoll
        print("once", end="")
        pycoll.run_ranks(lambda comm: print("rank"), 2)
    """
    out, _ = start(script).communicate(timeout=60)
    assert out.count("once") == 1 and out.count("rank") == 2


def start(script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def start_sleepers(folder: Path, threads: bool) -> tuple[subprocess.Popen[str], list[int]]:
    """A program whose three ranks sleep, and their process ids."""
    program = start(f"""
        import os, time, pathlib, pycoll

        def wait(comm):
            comm.barrier()
            pathlib.Path({str(folder)!r}, f"rank{{comm.rank}}").write_text(str(os.getpid()))
            time.sleep(1000)

        try:
            pycoll.run_ranks(wait, 3, threads={threads})
        except KeyboardInterrupt:
            print("interrupted")
    """)
    return program, wait_for_pids(folder, 3)


@both
def test_run_ranks_ctrl_c_leaves_no_process(threads, tmp_path: Path):
    program, pids = start_sleepers(tmp_path, threads)
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=50)
    assert out == "interrupted\n"
    assert program.returncode == 0
    wait_until_gone(pids)


def test_run_ranks_killed_caller_leaves_no_process(tmp_path: Path):
    program, pids = start_sleepers(tmp_path, threads=False)
    program.kill()
    program.communicate()
    wait_until_gone(pids)


def test_host_names_that_ssh_would_read_as_options_are_refused():
    assert host_names("a,ann@b-1,10.0.0.1,[fd00::1]") == ["a", "ann@b-1", "10.0.0.1", "[fd00::1]"]
    for names in ("-oProxyCommand=touch x", "a,-oX", "", "a,,b", "a b", "a,b\n", "a\x1b[31m"):
        with pytest.raises(UsageError, match="expected names such as a,b") as raised:
            host_names(names)
        assert "\x1b" not in str(raised.value)
