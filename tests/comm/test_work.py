"""async_op: a Work that is waited for, queried, dropped; in order, next to blocking calls."""

from __future__ import annotations

import builtins
import gc
import os
import subprocess
import sys
import textwrap
import time
import weakref

import numpy as np
import pytest
from worlds import on_ranks

from pycoll import (
    AbortedError,
    CollectiveMismatchError,
    PeerDiedError,
    TimeoutError,
    UsageError,
)
from pycoll.launch.local_ranks import local_communicators

pytestmark = pytest.mark.ranks


@on_ranks(2)
def test_work_wait_returns_the_result_array(comm):
    x = np.full(1000, comm.rank + 1.0)
    handle = comm.all_reduce(x, async_op=True)
    assert handle.wait() is x
    assert (x == 3).all()
    assert handle.wait() is x  # again
    assert handle.done()
    assert handle.exception() is None
    out = np.empty(1000)
    assert comm.all_reduce(x, out=out, async_op=True).wait(30) is out
    assert (out == 6).all()
    assert comm.broadcast(x, 1, async_op=True).wait() is x


@on_ranks(2)
def test_work_many_outstanding_run_in_order(comm):
    x = np.ones(300)
    handles = [comm.all_reduce(x, async_op=True) for _ in range(40)]
    others = [np.full(20_000, i + comm.rank) for i in range(20)]
    handles += [comm.all_reduce(other, async_op=True) for other in others]
    for handle in reversed(handles):
        handle.wait()
    assert (x == 2.0**40).all()  # each saw what the one before had left
    for i, other in enumerate(others):
        assert (other == 2 * i + 1).all()


@on_ranks(3)
def test_work_mixed_with_blocking_calls_keeps_the_order(comm):
    for i in range(30):
        x = np.full(5000, 1.0)
        handle = comm.all_reduce(x, async_op=True)
        if i % 3 == 0:
            comm.all_reduce(x)  # after the queued one, although it is not waited for
        elif i % 3 == 1:
            comm.barrier()
            comm.all_reduce(x)
        else:
            comm.all_reduce(x, async_op=True)
            comm.broadcast(np.zeros(3), 1)
        handle.wait(0)
        assert (x == comm.size**2).all()
        assert "measured" in comm.explain("all_reduce", 40_000)


@on_ranks(2)
def test_work_wait_timeout_leaves_it_running(comm):
    x = np.ones(10)
    if comm.rank == 0:
        handle = comm.all_reduce(x, async_op=True)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"still running after 0\.05 s") as caught:
            handle.wait(0.05)
        assert isinstance(caught.value, builtins.TimeoutError)
        assert 0.04 < time.monotonic() - start < 10
        assert not handle.done()
        assert handle.exception() is None
        time.sleep(0.1)
        comm.explain("all_reduce", 80)  # while one is stuck and its thread looks for signals
        handle.wait()
    else:
        time.sleep(0.4)  # longer than all that rank 0 does meanwhile
        comm.all_reduce(x)
    assert (x == 2).all()


@on_ranks(2)
def test_work_dropped_runs_all_the_same(comm):
    for _ in range(3):
        x = np.ones(2000)
        comm.all_reduce(x, async_op=True)
        comm.all_reduce(np.ones(2000), async_op=True)  # no other reference keeps this array
        gc.collect()
        comm.barrier()
        assert (x == 2).all()


@on_ranks(2)
def test_work_exception_is_what_wait_raises(comm):
    handle = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
    with pytest.raises(CollectiveMismatchError):
        handle.wait()
    with pytest.raises(CollectiveMismatchError):  # every time
        handle.wait(1)
    assert handle.done()
    assert isinstance(handle.exception(), CollectiveMismatchError)
    later = comm.all_reduce(np.ones(3), async_op=True)
    with pytest.raises((AbortedError, CollectiveMismatchError)):
        later.wait()


@on_ranks(2)
def test_close_with_pending_work_ends_it_without_the_peers(comm):
    part = comm.split(0)
    if comm.rank == 0:
        handles = [part.all_reduce(np.ones(10), async_op=True) for _ in range(5)]
        time.sleep(0.05)
        start = time.monotonic()
        part.close()
        assert time.monotonic() - start < 10
        for handle in handles:
            assert handle.done()
            with pytest.raises((AbortedError, PeerDiedError)):
                handle.wait()
        assert "closed with operations pending" in str(handles[0].exception())
    comm.barrier()


@on_ranks(2)
def test_communicator_dropped_with_pending_work_does_not_hang(comm):
    part = comm.split(0)
    if comm.rank == 0:
        part.all_reduce(np.ones(10), async_op=True)
        time.sleep(0.05)
        del part  # closes it; its thread needs the GIL to let go of the array
        gc.collect()
    comm.barrier()


@on_ranks(2)
def test_work_keeps_its_communicator_until_it_is_over(comm):
    part = comm.split(0)
    if comm.rank == 0:
        handle = part.all_reduce(np.ones(10), async_op=True)
        del part
        gc.collect()
        comm.barrier()
        assert (handle.wait() == 2).all()
    else:
        comm.barrier()
        part.all_reduce(np.ones(10))


@on_ranks(2, own=True)
def test_work_of_the_parent_raises_in_a_forked_process(comm):
    if comm.rank == 0:
        handle = comm.all_reduce(np.ones(10), async_op=True)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for ask in (handle.wait, handle.done, handle.exception):
                    with pytest.raises(UsageError, match="forked from"):
                        ask()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        comm.barrier()
        handle.wait()
    else:
        comm.all_reduce(np.ones(10))
        comm.barrier()


def test_finalizer_that_calls_a_closed_communicator_at_exit_does_not_abort():
    script = """
        import sys, pycoll
        class Trainer:
            def __init__(self): self.comm = pycoll.init()
            def __del__(self): self.comm.barrier()
        sys.trainer = Trainer()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr


def test_work_keeps_its_arrays_alive_until_it_is_over():
    (comm,) = local_communicators(1)
    data = bytearray(8)
    comm.all_reduce(data, async_op=True).wait()
    data.append(1)  # raises BufferError while a view is held
    comm.close()


class Watched(np.ndarray):
    """An array that can be watched."""


@on_ranks(2)
def test_communicator_may_end_on_the_thread_that_runs_its_operations(comm):
    """A finalizer, or the garbage collector, drops its last reference there."""
    for is_message in (False, True):
        held = [comm.split(0)]
        x = np.ones(1000).view(Watched)
        weakref.finalize(x, held.clear)
        if not is_message:
            held[0].all_reduce(x, async_op=True)
        elif comm.rank == 0:
            held[0].recv(x, 1, async_op=True)
        else:
            held[0].send(x, 0)
        del x  # the operation has the last reference
        deadline = time.monotonic() + 30
        while held:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert comm.all_reduce(np.ones(3))[0] == comm.size
