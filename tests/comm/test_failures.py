"""Ranks that die, stop, stay away or leave: the others learn who, in time; nothing is left."""

from __future__ import annotations

import builtins
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from comm_cases import both
from processes import child_pids

import pycoll
from pycoll import AbortedError, Error, PeerDiedError, TimeoutError, UsageError, run_ranks
from pycoll.launch.processes import World

pytestmark = pytest.mark.ranks

ROOT = Path(pycoll.__file__).parents[1]


def litter() -> tuple[set[str], set[int]]:
    """What bears our name in /dev/shm and in the folder for temporary files; child processes."""
    folders = ("/dev/shm", tempfile.gettempdir())
    files = {name for folder in folders for name in os.listdir(folder) if "pycoll" in name.lower()}
    return files, child_pids()


@pytest.mark.parametrize("count", [1, 1000, 100_000, 4_000_000])
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_killed_rank_raises_peer_died_on_the_others_within_a_second(victim, count, tmp_path):
    before = litter()
    clock = tmp_path / "killed"

    def work(comm: pycoll.Communicator) -> tuple[float, int, int, str]:
        x = np.ones(count, np.float32)
        try:
            for i in range(1_000_000):
                if comm.rank == victim and i == 20:
                    clock.write_text(repr(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                comm.all_reduce(x, "max")
        except PeerDiedError as error:
            noticed_s = time.monotonic()
            with pytest.raises(Error):  # broken for good, and says so at once
                comm.barrier()
            assert time.monotonic() - noticed_s < 0.5
            return noticed_s, error.rank, error.signal, str(error)
        raise AssertionError("the loop ended")

    outcomes = run_ranks(work, 4, return_errors=True, timeout_s=20)
    killed_s = float(clock.read_text())
    slowest_s = 0.0
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, PeerDiedError)  # of run_ranks, who saw it end
            continue
        assert not isinstance(outcome, Exception), outcome
        noticed_s, culprit, signum, text = outcome
        assert (culprit, signum) == (victim, signal.SIGKILL), text
        assert f"the process of rank {victim} was ended by signal 9" in text
        slowest_s = max(slowest_s, noticed_s - killed_s)
    print(f"\nkill -9 of rank {victim}, {count} elements: noticed in {slowest_s * 1e3:.1f} ms")
    assert slowest_s < 1.0
    assert litter() == before


def test_killed_rank_in_the_middle_of_async_work_ends_it():
    def work(comm: pycoll.Communicator) -> str:
        if comm.rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        handles = [comm.all_reduce(np.ones(1000), async_op=True) for _ in range(10)]
        for handle in handles:
            with pytest.raises(PeerDiedError):
                handle.wait()
        return str(handles[0].exception())

    outcomes = run_ranks(work, 3, return_errors=True, timeout_s=20)
    assert "rank 1 was ended by signal 9" in outcomes[0]
    assert "rank 1 was ended by signal 9" in outcomes[2]


def test_new_communicator_can_be_made_after_a_rank_died():
    def work(comm: pycoll.Communicator) -> None:
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError):
            comm.barrier()

    run_ranks(work, 3, return_errors=True)
    assert run_ranks(lambda comm: comm.all_reduce(np.ones(3)).tolist(), 3) == [[3.0] * 3] * 3


@both
@pytest.mark.parametrize("count", [1, 300_000])
def test_rank_that_never_comes_is_named_by_all_in_time(threads, count):
    def work(comm: pycoll.Communicator) -> None:
        x = np.ones(count)
        comm.all_reduce(x)
        if comm.rank == 2:
            time.sleep(1.2)
            with pytest.raises(AbortedError, match="timed out waiting for rank 2"):
                comm.all_reduce(x)
            return
        start = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            comm.all_reduce(x)
        assert isinstance(caught.value, builtins.TimeoutError)
        assert 0.3 < time.monotonic() - start < 1.1
        text = str(caught.value)
        assert f"all_reduce #2: rank {comm.rank} of 4" in text
        assert "waited 0.4 s" in text
        assert "rank 2 has not entered it" in text
        start = time.monotonic()
        with pytest.raises(AbortedError, match="timed out"):
            comm.all_reduce(x)
        assert time.monotonic() - start < 0.2

    run_ranks(work, 4, threads=threads, timeout_s=0.4)


@both
def test_rank_that_closes_early_raises_peer_died_on_who_needs_it(threads):
    def work(comm: pycoll.Communicator) -> None:
        comm.all_reduce(np.ones(10))
        if comm.rank == 1:
            comm.close()
            return
        start = time.monotonic()
        with pytest.raises(PeerDiedError, match="rank 1 closed its communicator") as caught:
            comm.all_reduce(np.ones(10))
        assert (caught.value.rank, caught.value.signal) == (1, 0)
        assert time.monotonic() - start < 1

    run_ranks(work, 3, threads=threads, timeout_s=20)


@both
def test_rank_that_closes_after_its_part_leaves_the_result_to_the_others(threads):
    def work(comm: pycoll.Communicator) -> None:
        for _ in range(20):
            part = comm.split(0)
            x = np.full(5, comm.rank)
            part.broadcast(x, root=1)  # the root need not wait for anybody
            part.close()
            assert (x == 1).all()

    run_ranks(work, 3, threads=threads)


def test_stopped_rank_is_a_timeout():
    def work(comm: pycoll.Communicator) -> str:
        pids = np.zeros(comm.size, np.int64)
        pids[comm.rank] = os.getpid()
        comm.all_reduce(pids)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return "went on"
        with pytest.raises(TimeoutError) as caught:
            for _ in range(100):
                comm.all_reduce(np.ones(1000))
        time.sleep(0.2)
        os.kill(int(pids[1]), signal.SIGCONT)
        return str(caught.value)

    texts = run_ranks(work, 3, timeout_s=0.4)
    assert texts[1] == "went on"
    assert "rank 1 has not entered it" in texts[0]
    assert "rank 1 has not entered it" in texts[2]


def test_rank_stopped_within_an_operation_is_named_by_those_who_wait_for_its_neighbours():
    """It has entered; some ranks wait for others, which wait for it."""

    def stop_soon(pid: int) -> None:
        time.sleep(0.03)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(pid, signal.SIGCONT)

    def work(comm: pycoll.Communicator) -> str:
        x = np.ones(4_000_000, np.float32)
        comm.barrier()
        if comm.rank == 2 and (child := os.fork()) == 0:
            stop_soon(os.getppid())
            os._exit(0)
        with pytest.raises((TimeoutError, AbortedError)) as caught:
            for _ in range(100_000):
                comm.all_reduce(x, "max", algorithm="ring")
        if comm.rank == 2:
            os.waitpid(child, 0)
        return str(caught.value)

    texts = run_ranks(work, 5, timeout_s=0.4)
    for rank in (0, 1, 3, 4):
        assert re.search("rank 2 (holds it up|has not entered)|waiting for rank 2", texts[rank])
    assert "waiting for rank 2" in texts[2]


def test_rank_that_never_comes_to_init_is_named():
    script = """
        import os, sys, time
        import pycoll
        start = time.monotonic()
        try:
            pycoll.init(timeout_s=0.7)
        except pycoll.TimeoutError as error:
            print(f"{time.monotonic() - start:.2f} {error}")
    """
    world = World(3)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **world.environment(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 2)
    ]
    texts = [process.communicate(timeout=30)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    took_s = [float(text.partition(" ")[0]) for text in texts]
    # The first deadline counts: on a busy machine the other rank starts later, and waits less.
    assert 0.5 < max(took_s) < 5
    assert all("rank 1" in text.partition(" ")[2] for text in texts)


@both
def test_forked_process_that_exits_does_not_take_the_rank_with_it(threads):
    def work(comm: pycoll.Communicator) -> None:
        comm.all_reduce(np.ones(10), async_op=True).wait()
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    with pytest.raises(UsageError):
                        comm.barrier()  # two processes cannot be one rank
                    comm.close()
                finally:
                    os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        x = np.ones(10)
        comm.all_reduce(x)
        comm.all_reduce(x, async_op=True).wait()
        assert (x == 4).all()

    run_ranks(work, 2, threads=threads, timeout_s=10)


@both
def test_forked_process_lets_go_of_a_communicator_whose_threads_it_has_not(threads):
    def work(comm: pycoll.Communicator) -> None:
        part = comm.split(0)
        x = np.ones(10)
        received = part.recv(np.empty(10), 1 - comm.rank, async_op=True)
        part.send(x, 1 - comm.rank)
        received.wait()
        part.all_reduce(x, async_op=True).wait()
        time.sleep(0.5)  # its threads sleep
        child = os.fork()
        if child == 0:
            try:
                del part, received
            finally:
                os._exit(0)
        deadline = time.monotonic() + 5
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        part.all_reduce(x)
        assert (x == 4).all()

    run_ranks(work, 2, threads=threads, timeout_s=10)
