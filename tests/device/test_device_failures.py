"""Errors instead of hangs, while kernels wait: each is raised by the next call or synchronize()."""

from __future__ import annotations

import mmap
import os
import signal
import time

import numpy as np
import pytest
from comm_cases import both
from device_ranks import run_ranks

import pycoll
from pycoll import (
    AbortedError,
    CollectiveMismatchError,
    PeerDiedError,
    TimeoutError,
    UsageError,
)
from pycoll.arrays.device import DeviceArray

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

DIRECT = "two_shot/direct"  # ranks write each other's outputs


def reduced(comm: pycoll.Communicator, count: int = 100) -> DeviceArray:
    """An array that an operation has used: links are made, and nothing is under way."""
    x = DeviceArray.of(np.ones(count, np.float32))
    comm.all_reduce(x)
    comm.synchronize()
    return x


def test_killed_rank_is_named_while_kernels_wait(ranks_may_be_killed):
    def work(comm: pycoll.Communicator) -> tuple[float, str]:
        x = reduced(comm, 10_000)
        if comm.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x)
        start = time.monotonic()
        with pytest.raises(PeerDiedError, match="rank 1 was ended by signal 9") as caught:
            comm.synchronize()
        assert caught.value.rank == 1
        with pytest.raises(PeerDiedError):  # broken from now on
            comm.all_reduce(x)
        return time.monotonic() - start, str(caught.value)

    outcomes = run_ranks(work, 3, return_errors=True, timeout_s=20)
    for rank in (0, 2):
        assert not isinstance(outcomes[rank], Exception), outcomes
        took_s, text = outcomes[rank]
        assert took_s < 15 and "all_reduce" in text


@pytest.mark.parametrize("how", ["kill", "abort"])
def test_kernels_that_wait_end_long_before_the_deadline_and_the_device_is_usable_at_once(
    how, ranks_may_be_killed
):
    """Within 5 s of the fault, on a busy machine, with 200 queued calls: the median is 40 ms. The
    campaign device_kills prints that of one call."""
    fault_s = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float64)

    def work(comm: pycoll.Communicator) -> float:
        x = reduced(comm, 10_000)
        other = comm.split(0)
        assert other is not None
        took_s = 0.0
        if comm.rank == 1:
            time.sleep(0.3)  # kernels of the other ranks wait by then
            fault_s[0] = time.monotonic()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            comm.abort("no more")
        else:
            for _ in range(200):
                comm.all_reduce(x)
            with pytest.raises(PeerDiedError if how == "kill" else AbortedError):
                comm.synchronize()
            took_s = time.monotonic() - fault_s[0]
        world = comm.shrink(20) if how == "kill" else other
        y = DeviceArray.of(np.ones(1000, np.float32))
        world.all_reduce(y)
        assert (y.numpy() == world.size).all()
        return took_s

    outcomes = run_ranks(work, 3, return_errors=True, timeout_s=20)
    assert max(outcomes[0], outcomes[2]) < 5, outcomes


@both
def test_other_calls_on_ranks_are_a_mismatch_on_all(threads):
    def work(comm: pycoll.Communicator) -> str:
        x = reduced(comm, 1000)
        part = x.part(0, 999) if comm.rank == 1 else x
        with pytest.raises(CollectiveMismatchError) as caught:
            comm.all_reduce(part)
            comm.synchronize()
        return str(caught.value)

    for text in run_ranks(work, 3, threads=threads, timeout_s=20):
        assert "shape (999,)" in text and "shape (1000,)" in text
        assert "on a device" in text and "test_device_failures.py:" in text


def test_host_array_against_device_array_is_a_mismatch():
    def work(comm: pycoll.Communicator) -> str:
        x = reduced(comm, 64)
        with pytest.raises(CollectiveMismatchError) as caught:
            comm.all_reduce(np.ones(64, np.float32) if comm.rank == 0 else x)
            comm.synchronize()
        return str(caught.value)

    for text in run_ranks(work, 2, timeout_s=20):
        assert text.count("on a device") == 1


@pytest.mark.parametrize("waits", ["kernels", "streams"])
def test_rank_that_never_comes_is_named_at_the_deadline(monkeypatch, waits):
    monkeypatch.setenv("PYCOLL_DEVICE_WAITS", waits)

    def work(comm: pycoll.Communicator) -> tuple[float, str]:
        x = reduced(comm)
        start = time.monotonic()
        if comm.rank == 2:
            while time.monotonic() < start + 2.5:
                time.sleep(0.05)
            with pytest.raises(AbortedError):
                comm.all_reduce(x)
            return 0.0, ""
        with pytest.raises(TimeoutError) as caught:
            comm.all_reduce(x)
            comm.synchronize()
        return time.monotonic() - start, str(caught.value)

    for took_s, text in run_ranks(work, 3, timeout_s=1.0)[:2]:
        assert 0.8 < took_s < 20
        assert "rank 2 has not entered it" in text and "1 s" in text


def test_rank_that_leaves_is_named_at_once():
    def work(comm: pycoll.Communicator) -> str:
        x = DeviceArray.of(np.ones(100, np.float32))
        comm.all_reduce(x)
        if comm.rank == 0:
            return ""  # run_ranks closes its communicator
        start = time.monotonic()
        with pytest.raises(PeerDiedError, match="rank 0 closed its communicator") as caught:
            comm.all_reduce(x)
            comm.synchronize()
        assert time.monotonic() - start < 15
        return str(caught.value)

    run_ranks(work, 2, timeout_s=20)


def test_async_work_raises_what_ended_it(ranks_may_be_killed):
    def work(comm: pycoll.Communicator) -> None:
        x, y = (DeviceArray.of(np.ones(100, np.float32)) for _ in range(2))
        good = comm.all_reduce(x, async_op=True)
        good.wait(timeout_s=20)
        if comm.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        bad = comm.all_reduce(y, async_op=True)
        with pytest.raises(PeerDiedError):
            bad.wait(timeout_s=20)
        assert isinstance(bad.exception(), PeerDiedError)
        assert good.exception() is None

    outcomes = run_ranks(work, 2, return_errors=True, timeout_s=20)
    assert outcomes[0] is None, outcomes[0]


def test_error_on_the_host_ends_kernels_too():
    def work(comm: pycoll.Communicator) -> None:
        x = reduced(comm)
        if comm.rank == 0:
            with pytest.raises((CollectiveMismatchError, PeerDiedError)):
                comm.barrier()
            return
        with pytest.raises(CollectiveMismatchError):
            comm.all_reduce(x)
            comm.synchronize()

    run_ranks(work, 2, timeout_s=20)


def test_close_with_kernels_that_wait_ends_in_time():
    def work(comm: pycoll.Communicator) -> float:
        x = reduced(comm)
        start = time.monotonic()
        if comm.rank == 0:
            comm.all_reduce(x)
        else:
            time.sleep(0.2)
        comm.close()
        return time.monotonic() - start

    assert max(run_ranks(work, 2, timeout_s=20)) < 15


def test_more_ranks_than_blocks_are_refused(emulated, monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_PROCESSORS", "2")

    def work(comm: pycoll.Communicator) -> None:
        with pytest.raises(UsageError, match="3 ranks share one device .*2 blocks"):
            comm.all_reduce(DeviceArray.of(np.ones(4, np.float32)))

    run_ranks(work, 3, timeout_s=20)


@both
def test_communicators_share_the_blocks_of_a_device(emulated, monkeypatch, threads):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_PROCESSORS", "4")

    def use(comm: pycoll.Communicator) -> str:
        comm.all_reduce(DeviceArray.of(np.ones(4, np.float32)))
        comm.synchronize()
        return comm.explain("all_reduce", 16, on_device=True)

    def work(comm: pycoll.Communicator) -> None:
        use(comm)
        second = comm.split(0)
        if threads:  # one launch of all ranks, which begins when it has room
            use(second)
            return
        assert "at most 1 blocks" in use(second)
        third = comm.split(0)
        with pytest.raises(UsageError, match="4 blocks at once, of which other .* have 4"):
            use(third)
        second.close()
        fourth = comm.split(0)
        use(fourth)

    run_ranks(work, 2, threads=threads, timeout_s=30)


@pytest.mark.parametrize("waits", ["kernels", "streams"])
@pytest.mark.parametrize("how", ["empty", "register"])
def test_kernel_that_starts_after_the_error_changes_nothing(how, waits, monkeypatch):
    """Rank 1's stream is held up by an operation of another communicator, until rank 0 has given
    up, restored its arrays, and taken part in the other operation."""
    monkeypatch.setenv("PYCOLL_DEVICE_WAITS", waits)

    def work(comm: pycoll.Communicator) -> None:
        other, agreed = comm.split(0), comm.split(0)
        assert other is not None and agreed is not None
        count = 100_000
        if how == "empty":
            x, out = (comm.empty(count, "f32", device=0) for _ in range(2))
        else:
            x, out = (comm.register(DeviceArray.empty(count)) for _ in range(2))
        y = reduced(other)
        x.copy_from(np.full(count, comm.rank + 1, np.float32))
        comm.all_reduce(x, out=out, algorithm=DIRECT)
        comm.synchronize()
        agreed.barrier()
        if comm.rank == 1:
            other.all_reduce(y)
            comm.all_reduce(x, out=out, algorithm=DIRECT)
            agreed.barrier()
            agreed.barrier()
            with pytest.raises(AbortedError):
                comm.synchronize()
            x.copy_from(np.full(count, -5, np.float32))
            agreed.barrier()
            return
        comm.all_reduce(x, out=out, algorithm=DIRECT)
        agreed.barrier()
        comm.abort("rank 1 is late")
        with pytest.raises(AbortedError):
            comm.synchronize()
        restored = np.full(count, 777, np.float32)
        x.copy_from(restored)
        out.copy_from(restored)
        other.all_reduce(y)
        agreed.barrier()
        agreed.barrier()
        np.testing.assert_array_equal(x.numpy(), restored)
        np.testing.assert_array_equal(out.numpy(), restored)
        other.synchronize()

    run_ranks(work, 2, timeout_s=20)
