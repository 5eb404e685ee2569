"""Ranks that die, stop, stay away, leave or get Ctrl-C: the errors of the others, in time."""

from __future__ import annotations

import builtins
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from processes import child_pids, pycoll_files, wait_for_pids, wait_until_gone
from worlds import Comm, impatient, on_ranks

import pycoll
from pycoll import AbortedError, Error, PeerDiedError, TimeoutError, UsageError, run_ranks
from pycoll.launch.processes import World

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

ROOT = Path(pycoll.__file__).parents[1]


def start(script: str, env: Mapping[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
    )


def litter() -> tuple[set[str], set[int]]:
    """Files named pycoll in /dev/shm and in the folder for temporary files; child processes."""
    return pycoll_files(), child_pids()


@pytest.mark.parametrize(("victim", "count"), [(0, 1), (2, 1000), (3, 100_000), (0, 4_000_000)])
def test_killed_rank_raises_peer_died_on_the_others_in_time(victim, count, tmp_path):
    before = litter()
    clock = tmp_path / "killed"

    def work(comm: Comm) -> tuple[float, int, int, str]:
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
            assert time.monotonic() - noticed_s < 5
            return noticed_s, error.rank, error.signal, str(error)
        raise AssertionError("the loop ended")

    outcomes = run_ranks(work, 4, return_errors=True, timeout_s=20)
    killed_s = float(clock.read_text())
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, PeerDiedError)  # from run_ranks, which saw it end
            continue
        assert not isinstance(outcome, Exception), outcome
        noticed_s, culprit, signum, text = outcome
        assert (culprit, signum) == (victim, signal.SIGKILL), text
        assert f"the process of rank {victim} was ended by signal 9" in text
        assert noticed_s - killed_s < 5
    assert litter() == before
    # The next world is as good as new.
    assert run_ranks(lambda comm: comm.all_reduce(np.ones(3)).tolist(), 3) == [[3.0] * 3] * 3


def test_killed_rank_in_the_middle_of_async_work_ends_it():
    def work(comm: Comm) -> str:
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


@pytest.mark.parametrize(("count", "threads"), [(1, False), (300_000, True)])
def test_rank_that_never_calls_is_named_by_all_in_time(count, threads):
    def work(comm: Comm) -> None:
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
        assert 0.3 < time.monotonic() - start < 10
        text = str(caught.value)
        assert f"all_reduce #2: rank {comm.rank} of 4" in text
        assert "waited 0.4 s" in text
        assert "rank 2 has not entered it" in text
        with pytest.raises(AbortedError, match="timed out"):  # and no timeout of its own
            comm.all_reduce(x)

    run_ranks(impatient(work, 0.4), 4, threads=threads)


@pytest.mark.slow
def test_death_of_one_of_96_processes_is_seen_by_all():
    def work(comm: Comm) -> int:
        x = np.full(5, comm.rank)
        with pytest.raises(PeerDiedError) as died:
            comm.all_reduce(x, algorithm="tree")  # may end by the death, too, on a late rank
            assert (x == 96 * (96 - 1) // 2).all()
            if comm.rank == 77:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(x, algorithm="tree")
        return int(died.value.rank)

    outcomes = run_ranks(work, 96, timeout_s=100, return_errors=True)
    assert [outcome for rank, outcome in enumerate(outcomes) if rank != 77] == [77] * (96 - 1)


@pytest.mark.parametrize("victim", [1, 2])
def test_death_is_told_at_once_while_another_rank_computes(victim):
    """Rank 0 may wait for the rank that computes, not for the dead one."""

    def work(comm: Comm) -> tuple[int, float]:
        comm.barrier()
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 3 - victim:
            time.sleep(1.0)
        begin_s = time.monotonic()
        with pytest.raises(PeerDiedError) as died:
            comm.all_reduce(np.ones(1000))
        return int(died.value.rank), time.monotonic() - begin_s

    outcomes = run_ranks(work, 3, timeout_s=20, return_errors=True)
    assert outcomes[0][0] == outcomes[3 - victim][0] == victim
    assert outcomes[0][1] < 0.5


def test_death_within_split_is_told_with_its_rank_in_the_communicator_that_is_split():
    """The rank is killed at several moments: in the reduction of the colors, and in the join."""

    def work(comm: Comm, after_s: float) -> tuple[int, float]:
        comm.barrier()
        if comm.rank == 1:
            command = f"sleep {after_s}; kill -KILL {os.getpid()}"
            subprocess.Popen(["sh", "-c", command])
        last_s = time.monotonic()
        with pytest.raises(PeerDiedError) as died:
            while True:
                comm.split(int(comm.rank != 0), -comm.rank).close()
                last_s = time.monotonic()
        return int(died.value.rank), time.monotonic() - last_s

    for i in range(8):
        outcomes = run_ranks(work, 4, 0.02 + 0.0013 * i, timeout_s=20, return_errors=True)
        others = [outcomes[rank] for rank in (0, 2, 3)]
        assert [rank for rank, _ in others] == [1, 1, 1], others
        assert max(took_s for _, took_s in others) < 1, others


def test_split_ends_at_once_when_a_member_cannot_come_and_gives_up():
    def work(comm: Comm) -> float:
        comm.barrier()
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
            with pytest.raises(pycoll.SystemError):
                comm.split(0)
            comm.abort("rank 1 cannot split")
        start = time.monotonic()
        with pytest.raises(AbortedError, match="rank 1 cannot split"):
            comm.split(0)
        return time.monotonic() - start

    assert max(run_ranks(work, 3, timeout_s=20)) < 5


@on_ranks(3)
def test_rank_that_closes_early_raises_peer_died_where_it_is_needed(comm):
    comm.all_reduce(np.ones(10))
    if comm.rank == 1:
        comm.close()
        return
    start = time.monotonic()
    with pytest.raises(PeerDiedError, match="rank 1 closed its communicator") as caught:
        comm.all_reduce(np.ones(10))
    assert (caught.value.rank, caught.value.signal) == (1, 0)
    assert time.monotonic() - start < 10


@on_ranks(3)
def test_rank_that_closes_after_its_part_leaves_the_result_to_the_others(comm):
    for _ in range(20):
        part = comm.split(0)
        x = np.full(5, comm.rank)
        part.broadcast(x, root=1)  # the root need not wait for another rank
        part.close()
        assert (x == 1).all()


def test_stopped_rank_is_a_timeout():
    def work(comm: Comm) -> str:
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

    texts = run_ranks(impatient(work, 0.4), 3)
    assert texts[1] == "went on"
    assert "rank 1 has not entered it" in texts[0]
    assert "rank 1 has not entered it" in texts[2]


def test_rank_stopped_within_an_operation_is_named_by_ranks_that_wait_for_its_neighbours():
    """It has entered the operation; some ranks wait for ranks that wait for it."""

    def stop_soon(pid: int) -> None:
        time.sleep(0.03)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(pid, signal.SIGCONT)

    def work(comm: Comm) -> str:
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

    texts = run_ranks(impatient(work, 0.4), 5)
    for rank in (0, 1, 3, 4):
        assert re.search(
            "rank 2 (holds (it|them) up|has not entered)|waiting for rank 2", texts[rank]
        )
    assert "waiting for rank 2" in texts[2]


def test_rank_that_never_calls_init_is_named():
    script = """
        import time
        import pycoll
        start = time.monotonic()
        try:
            pycoll.init(timeout_s=0.7)
        except pycoll.TimeoutError as error:
            print(f"{time.monotonic() - start:.2f} {error}")
    """
    world = World(3)
    started = [start(script, world.environment(rank)) for rank in (0, 2)]
    texts = [process.communicate(timeout=30)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    took_s = [float(text.partition(" ")[0]) for text in texts]
    # The first deadline counts: on a busy machine the other rank starts later, and waits less.
    assert 0.5 < max(took_s) < 20
    assert all("rank 1" in text.partition(" ")[2] for text in texts)


@on_ranks(2, own=True)
def test_forked_process_that_exits_does_not_take_the_rank_with_it(comm):
    comm.all_reduce(np.ones(10), async_op=True).wait()
    if comm.rank == 0:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(UsageError):
                    comm.barrier()  # two processes cannot be one rank
                comm.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x = np.ones(10)
    comm.all_reduce(x)
    comm.all_reduce(x, async_op=True).wait()
    assert (x == 4).all()


@on_ranks(2, own=True)
def test_forked_process_frees_a_communicator_without_its_threads(comm):
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
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    part.all_reduce(x)
    assert (x == 4).all()


@on_ranks(3)
def test_abort_ends_the_calls_of_all_ranks_with_its_reason(comm):
    part = comm.split(0)
    if comm.rank == 1:
        time.sleep(0.05)
        part.abort("the loss is nan")
    for _ in range(2):  # the first call may wait already; the second one begins after it
        with pytest.raises(AbortedError, match="rank 1 aborted the communicator: the loss is nan"):
            part.all_reduce(np.ones(10))
    with pytest.raises(AbortedError, match="the loss is nan"):
        part.recv(np.empty(10), (comm.rank + 1) % 3)
    work = comm.all_reduce(np.ones(10), async_op=True)  # the communicator around it goes on
    work.wait()
    part.close()
    with pytest.raises(UsageError, match="closed"):
        part.abort()


# --- Ctrl-C ---


BLOCKING = {
    "all_reduce": "comm.all_reduce(x)",
    "large_all_reduce": "comm.all_reduce(np.ones(500_000))",
    "barrier": "comm.barrier()",
    "broadcast": "comm.broadcast(x, root=1)",
    "split": "comm.split(0)",
    "work": "comm.all_reduce(x, async_op=True).wait()",
    "behind_work": "comm.all_reduce(x, async_op=True); comm.all_reduce(x)",
}


def blocking_script(call: str, folder: Path) -> str:
    """Rank 0 waits in the call for rank 1, which never calls it."""
    return f"""
        import os, pathlib, sys, time
        import numpy as np
        import pycoll

        def work(comm):
            comm.barrier()
            x = np.ones(10)
            interrupted = pathlib.Path({str(folder)!r}, "interrupted")
            if comm.rank == 1:
                while not interrupted.exists():
                    time.sleep(0.01)
                return
            pathlib.Path({str(folder)!r}, "rank0").write_text(str(os.getpid()))
            try:
                {call}
            except KeyboardInterrupt:
                interrupted.write_text(str(time.monotonic()))
                raise

        try:
            pycoll.run_ranks(work, 2, timeout_s=30)
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
        except pycoll.Error as error:
            print(error)
    """


def test_ctrl_c_in_a_blocked_rank_raises_keyboard_interrupt_promptly(tmp_path):
    folders = {name: tmp_path / name for name in BLOCKING}
    parents = {}
    try:
        for name, folder in folders.items():
            folder.mkdir()
            parents[name] = start(blocking_script(BLOCKING[name], folder))
        pids = {name: wait_for_pids(folder, 1)[0] for name, folder in folders.items()}
        time.sleep(0.3)  # until they are well inside
        for name, parent in parents.items():
            sent_s = time.monotonic()
            os.kill(pids[name], signal.SIGINT)
            out, _ = parent.communicate(timeout=20)
            assert "raised KeyboardInterrupt" in out, name
            took_s = float((folders[name] / "interrupted").read_text()) - sent_s
            assert took_s < 10, name
    finally:
        for parent in parents.values():
            parent.kill()
            parent.wait()
            parent.stdout.close()


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_ctrl_c_in_the_caller_of_run_ranks_leaves_no_process(threads, tmp_path):
    script = f"""
        import os, pathlib, time
        import numpy as np
        import pycoll

        def work(comm):
            comm.barrier()
            pathlib.Path({str(tmp_path)!r}, f"rank{{comm.rank}}").write_text(str(os.getpid()))
            try:
                while True:
                    comm.all_reduce(np.ones(1000))
            finally:
                if comm.rank == 0:  # the one whose end the caller waits for when Ctrl-C comes
                    time.sleep(0.1)
                left.append(comm.rank)

        left = []
        try:
            pycoll.run_ranks(work, 3, threads={threads})
        except KeyboardInterrupt:
            print("interrupted", sorted(left))
    """
    parent = start(script)
    try:
        pids = wait_for_pids(tmp_path, 3)
        time.sleep(0.2)
        parent.send_signal(signal.SIGINT)
        out, _ = parent.communicate(timeout=20)
    finally:
        parent.kill()
        parent.wait()
    assert out == f"interrupted {[0, 1, 2] if threads else []}\n"
    assert parent.returncode == 0
    wait_until_gone(pids)
