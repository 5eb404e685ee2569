"""Waits in streams, in place of kernels that wait: for processes that share a device in turn."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from cases import in_turn
from comm_cases import inputs
from device_checks import check
from device_ranks import run_ranks

import pycoll
from pycoll import (
    AbortedError,
    CollectiveMismatchError,
    CudaError,
    PeerDiedError,
    TimeoutError,
    UsageError,
    _core,
)
from pycoll.arrays.device import DeviceArray
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import roots_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

TIMEOUT_S = 20
WAITS = "PYCOLL_DEVICE_WAITS"


@pytest.fixture(autouse=True)
def streams_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAITS, "streams")


@pytest.fixture
def processes_take_turns(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WAITS)
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_MPS", "0")


def last_algorithm(comm: pycoll.Communicator) -> str:
    return comm.flight_record()[-1]["algorithm"]


def filled(count: int, value: float, **options: int) -> DeviceArray:
    return DeviceArray.of(np.full(count, value, np.float32), **options)


def every_collective_matches_its_oracle(comm: pycoll.Communicator) -> None:
    for name in ORACLES:
        for rows in (1, 5, 4099):
            for root in roots_of(name, comm.size):
                check(comm, name, rows, root)
    assert "streams wait for peers" in comm.explain("all_reduce", 400, on_device=True)


def plain_arrays_are_copied_to_where_no_kernel_waits(comm: pycoll.Communicator) -> None:
    """The larger one in several parts."""
    expected = {"all_gather": "/copy", "all_to_all": "/copy", "broadcast": "/copy"}
    for name in ("all_reduce", "reduce_scatter", "reduce", "gather", "scatter", *expected):
        check(comm, name, 6000, 0)
        assert last_algorithm(comm).endswith(expected.get(name, ("/direct", "/copy"))), name
    x = filled(3 << 20, comm.rank + 1)
    comm.all_reduce(x)
    assert (x.numpy() == sum(range(1, comm.size + 1))).all()
    gathered = comm.all_gather(x.part(0, 1 << 20)).numpy().reshape(comm.size, -1)
    assert (gathered == sum(range(1, comm.size + 1))).all()


def registered_arrays_have_the_bits_of_kernels_that_wait(comm: pycoll.Communicator) -> None:
    n, count = comm.size, 40_001
    parts = {
        "all_reduce": (1, 1), "all_gather": (1, n), "reduce_scatter": (n, 1), "all_to_all": (n, n),
    }  # fmt: skip
    for name, (ins, outs) in parts.items():
        x, out = (comm.empty(count * k, "f32", device=0) for k in (ins, outs))
        x.copy_from(inputs(n, count * ins)[comm.rank])
        expected = DeviceArray.empty(count * outs)
        algorithm = "one_shot" if name == "all_reduce" else "all_pairs"
        getattr(comm, name)(
            DeviceArray.of(x.numpy()), out=expected, algorithm=f"{algorithm}/simple"
        )
        getattr(comm, name)(x, out=out, algorithm=f"{algorithm}/direct")
        assert last_algorithm(comm) == f"{algorithm}/direct"
        assert out.numpy().tobytes() == expected.numpy().tobytes(), name


def replays_take_turns_with_calls(comm: pycoll.Communicator) -> None:
    """With registered and with plain arrays."""
    stream = _core.DeviceStream()
    arrays = [comm.empty(5000, "f32", device=0), DeviceArray.empty(5000)]
    for x in arrays:
        x.stream = stream.handle
        comm.all_reduce(x)
    comm.synchronize()
    comm.barrier()
    graphs = []
    for x in arrays:
        stream.begin_capture()
        comm.all_reduce(x, "max")
        graphs.append(stream.end_capture())
    for step in range(12):
        for x, graph in zip(arrays, graphs, strict=True):
            x.copy_from(np.full(5000, step + comm.rank, np.float32))
            if step % 3:
                stream.launch(graph)
            else:
                comm.all_reduce(x, "max")
                comm.synchronize()
            assert (x.numpy() == step + comm.size - 1).all()


def asynchronous_calls_and_several_streams_keep_their_order(comm: pycoll.Communicator) -> None:
    streams = [_core.DeviceStream() for _ in range(2)]
    x, y = filled(3000, comm.rank), filled(3000, 1)
    for step in range(6):
        x.stream = streams[step % 2].handle
        comm.all_reduce(x, "avg" if step else "sum")
        comm.all_reduce(y, "max", async_op=True)
    comm.synchronize()
    assert (x.numpy() == sum(range(comm.size))).all() and (y.numpy() == 1).all()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_calls_that_wait_in_streams(n):
    work = in_turn(
        every_collective_matches_its_oracle,
        plain_arrays_are_copied_to_where_no_kernel_waits,
        registered_arrays_have_the_bits_of_kernels_that_wait,
        asynchronous_calls_and_several_streams_keep_their_order,
    )
    run_ranks(work, n, timeout_s=TIMEOUT_S)


def test_captured_calls_that_wait_in_streams():
    run_ranks(replays_take_turns_with_calls, 3, timeout_s=TIMEOUT_S)


def test_ranks_that_are_threads_wait_in_streams_of_several_devices(emulated, monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_COUNT", "3")

    def work(comm: pycoll.Communicator) -> str:
        for count in (7, 100_000):
            x = filled(count, comm.rank + 1, device=comm.rank)
            comm.all_reduce(x)
            assert (x.numpy() == 6).all()
        return last_algorithm(comm)

    assert run_ranks(work, 3, threads=True, timeout_s=TIMEOUT_S)[0].endswith("/direct")
    monkeypatch.delenv(WAITS)
    assert not run_ranks(work, 3, threads=True, timeout_s=TIMEOUT_S)[0].endswith("/direct")


def test_ranks_need_no_blocks_together(emulated, monkeypatch):
    """Three ranks on a device with two blocks; kernels that wait would be refused."""
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_PROCESSORS", "2")

    def work(comm: pycoll.Communicator) -> None:
        x = filled(100_000, comm.rank + 1)
        comm.all_reduce(x)
        assert (x.numpy() == 6).all()
        with pytest.raises(UsageError, match="3 ranks share one device .*2 blocks"):
            comm.all_reduce(x, algorithm="ring/simple")

    run_ranks(work, 3, timeout_s=TIMEOUT_S)


def test_streams_wait_where_processes_take_turns_unless_they_cannot_or_shall_not(
    processes_take_turns, monkeypatch
):
    def algorithm_of(comm: pycoll.Communicator) -> str:
        if comm.rank == 1:
            os.environ.update(own)
        comm.all_reduce(x := filled(100, comm.rank))
        assert (x.numpy() == 1).all()
        return last_algorithm(comm)

    for own in ({}, {WAITS: "kernels"}, {"PYCOLL_DEVICE_THREADS_WORD_OPS": "0"}):
        names = run_ranks(algorithm_of, 2, timeout_s=TIMEOUT_S)
        assert [name.endswith("/direct") for name in names] == 2 * [not own], own

    def refused(comm: pycoll.Communicator) -> None:
        with pytest.raises(UsageError, match="streams is not possible: ranks 0 and 1 share"):
            comm.all_reduce(filled(100, comm.rank))

    monkeypatch.setenv(WAITS, "streams")
    run_ranks(refused, 2, threads=True, timeout_s=TIMEOUT_S)


# --- errors


def reduced(comm: pycoll.Communicator, count: int = 1000) -> DeviceArray:
    """An array that an operation has used: links are made, and nothing is under way."""
    comm.all_reduce(x := filled(count, 1))
    comm.synchronize()
    return x


def end_of_waits(how: str, num_queued: int) -> Callable[[pycoll.Communicator], float]:
    """Work of ranks that wait, with operations queued behind, until rank 1 dies or aborts. Returns
    the seconds from then on until all of them are over and the device can be used."""
    fault_s = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float64)

    def work(comm: pycoll.Communicator) -> float:
        x = reduced(comm)
        other = comm.split(0)
        assert other is not None
        took_s = 0.0
        if comm.rank == 1:
            time.sleep(0.3)
            fault_s[0] = time.monotonic()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            comm.abort("no more")
        else:
            for _ in range(num_queued):
                comm.all_reduce(x)
            error = PeerDiedError if how == "kill" else AbortedError
            said = "rank 1 was ended by signal 9" if how == "kill" else "rank 1 .*no more"
            with pytest.raises(error, match=said):
                comm.synchronize()
            took_s = time.monotonic() - fault_s[0]
            with pytest.raises(error):
                comm.all_reduce(x)
        world = comm.shrink(20) if how == "kill" else other
        world.all_reduce(y := filled(1000, 1))
        assert (y.numpy() == world.size).all()
        return took_s

    return work


@pytest.mark.parametrize("how", ["kill", "abort"])
def test_waits_of_all_queued_operations_end_with_the_fault(how, ranks_may_be_killed):
    """Within 5 s of the fault, on a busy machine. The median is 40 to 80 ms."""
    outcomes = run_ranks(end_of_waits(how, 200), 3, return_errors=True, timeout_s=TIMEOUT_S)
    assert max(outcomes[0], outcomes[2]) < 5, outcomes


def test_ranks_whose_peer_was_ended_by_the_fault_do_not_return_its_garbage():
    """In a star, rank 2 waits for rank 0 alone, which waits for rank 1."""

    def work(comm: pycoll.Communicator) -> None:
        for _ in range(8):
            part = comm.split(0)
            assert part is not None
            x = reduced(part)
            comm.barrier()
            if comm.rank == 1:
                part.abort("no more")
            else:
                with pytest.raises(AbortedError):
                    work = part.all_reduce(x, algorithm="star/direct", async_op=True)
                    try:
                        part.synchronize()
                    finally:
                        assert isinstance(work.exception(), AbortedError)
                assert (x.numpy() == comm.size).all()  # as before: no kernel ran after the fault
            comm.barrier()
            part.close()

    run_ranks(work, 3, timeout_s=TIMEOUT_S)


def test_deadline_of_a_replay_begins_with_the_replay():
    """Replays that last longer than the deadline together; then one whose peer does not come. Takes
    3 s: that of the replays, and the deadline."""

    def work(comm: pycoll.Communicator) -> None:
        stream = _core.DeviceStream()
        x = filled(100, 1, stream=stream.handle)
        comm.all_reduce(x, "max")
        comm.synchronize()
        comm.barrier()
        stream.begin_capture()
        comm.all_reduce(x, "max")
        graph = stream.end_capture()
        for _ in range(20):  # rank 0 waits nearly always
            time.sleep(0.05 * comm.rank)
            stream.launch(graph)
            stream.synchronize()
        comm.synchronize()  # no replay was late
        if comm.rank == 0:
            stream.launch(graph)
            with pytest.raises(TimeoutError, match="rank 1"):
                while True:
                    comm.synchronize()
                    time.sleep(0.01)
        else:
            time.sleep(1.5)

    run_ranks(work, 2, timeout_s=0.8)


def test_other_calls_are_a_mismatch_before_any_array_is_read():
    def work(comm: pycoll.Communicator) -> str:
        x = comm.empty(1000, "f32", device=0)
        comm.all_reduce(x)
        part = x.part(0, 999) if comm.rank == 1 else x
        with pytest.raises(CollectiveMismatchError) as caught:
            comm.all_reduce(part)
            comm.synchronize()
        return str(caught.value)

    for text in run_ranks(work, 3, timeout_s=TIMEOUT_S):
        assert "shape (999,)" in text and "shape (1000,)" in text


def test_a_peer_that_was_ended_does_not_end_the_call_of_another_rank():
    """Ranks that wait for rank 0 only, which waits for rank 1: its watchdog ends its wait, and its
    stream tells the others that it is done, before their watchdogs have looked. Takes 2 s: one of
    the others hit that moment in every second case."""

    def work(comm: pycoll.Communicator) -> None:
        x = comm.empty(1000, "f32", device=0)
        comm.all_reduce(x, algorithm="star/direct")
        if comm.rank == 1:
            time.sleep(0.02)  # the others' watchdogs look while their streams wait
        with pytest.raises(CollectiveMismatchError):
            comm.all_reduce(x.part(0, 999) if comm.rank == 1 else x, algorithm="star/direct")
            comm.synchronize()

    for _ in range(8):
        run_ranks(work, 6, timeout_s=TIMEOUT_S)


def test_replay_of_another_call_is_a_mismatch():
    def work(comm: pycoll.Communicator) -> None:
        stream = _core.DeviceStream()
        x = filled(100, 1, stream=stream.handle)
        graphs = []
        for op in ("max", "sum"):
            comm.all_reduce(x, op)
            comm.synchronize()
            stream.begin_capture()
            comm.all_reduce(x, op)
            graphs.append(stream.end_capture())
        comm.barrier()
        stream.launch(graphs[comm.rank])
        with pytest.raises(CollectiveMismatchError):
            while True:
                comm.synchronize()
                time.sleep(0.01)

    run_ranks(work, 2, timeout_s=TIMEOUT_S)


def test_rank_that_leaves_ends_the_waits_of_streams():
    def work(comm: pycoll.Communicator) -> None:
        x = reduced(comm)
        if comm.rank == 0:
            return  # run_ranks closes its communicator
        with pytest.raises(PeerDiedError, match="rank 0 closed its communicator"):
            comm.all_reduce(x)
            comm.synchronize()

    run_ranks(work, 2, timeout_s=TIMEOUT_S)


def test_operation_on_words_that_fails_frees_the_peers(emulated):
    def work(comm: pycoll.Communicator) -> None:
        x = reduced(comm)
        comm.barrier()
        if comm.rank == 1:
            os.environ["PYCOLL_DEVICE_THREADS_FAIL"] = "queue_words:CUDA_ERROR_UNKNOWN"
            with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
                comm.all_reduce(x)
        else:
            with pytest.raises(AbortedError, match="rank 1 .*CUDA_ERROR_UNKNOWN"):
                comm.all_reduce(x)
                comm.synchronize()

    run_ranks(work, 2, timeout_s=TIMEOUT_S)
