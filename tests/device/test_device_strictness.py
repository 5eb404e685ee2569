"""The emulated device refuses, delays and fails where CUDA does; and what pycoll makes of it."""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from cases import in_turn
from device_ranks import run_ranks

import pycoll
from pycoll import AbortedError, CudaError, TimeoutError, _core
from pycoll.arrays.device import DeviceArray

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60), pytest.mark.usefixtures("emulated")]

FAIL = "PYCOLL_DEVICE_THREADS_FAIL"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def explained(comm: pycoll.Communicator) -> str:
    return comm.explain("all_reduce", 400, on_device=True)


def device_bytes() -> int:
    """Mapped memory of devices in this process."""
    spans = (
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "pycoll-device" in line
    )
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def default_stream_and_waits_are_refused_while_a_stream_is_captured(
    comm: pycoll.Communicator,
) -> None:
    stream, other = _core.DeviceStream(), _core.DeviceStream()
    x = DeviceArray.of(np.ones(8, np.float32))
    stream.begin_capture()
    with pytest.raises(CudaError, match="work on the default stream is not allowed while"):
        x.copy_from(np.zeros(8, np.float32))
    with pytest.raises(CudaError, match="not allowed for a thread that captures"):
        other.synchronize()
    with pytest.raises(CudaError, match="an allocation is not allowed"):
        DeviceArray.empty(3)
    stream.end_capture()
    other.synchronize()
    assert (x.numpy() == 1).all()


def array_that_is_dropped_in_a_capture_is_freed_after_it(comm: pycoll.Communicator) -> None:
    stream = _core.DeviceStream()
    before = device_bytes()
    x = DeviceArray.empty(1 << 20)
    assert device_bytes() > before
    stream.begin_capture()
    del x
    gc.collect()
    assert device_bytes() > before
    stream.end_capture()
    DeviceArray.empty(1)  # dropped at once, and what was dropped before with it
    assert device_bytes() == before


def test_captures_are_strict():
    work = in_turn(
        default_stream_and_waits_are_refused_while_a_stream_is_captured,
        array_that_is_dropped_in_a_capture_is_freed_after_it,
    )
    run_ranks(work, 1)


def calls_on_two_streams_in_other_orders(comm: pycoll.Communicator) -> str:
    """Rank 0 begins with one communicator, rank 1 with the other, both on streams of their own."""
    other = comm.split(0)
    assert other is not None
    work = []
    streams = [_core.DeviceStream() for _ in range(2)]
    for each, stream in zip((comm, other), streams, strict=True):
        x = DeviceArray.of(np.ones(100, np.float32), stream=stream.handle)
        each.all_reduce(x)
        each.synchronize()
        work.append((each, x))
    for each, x in work if comm.rank == 0 else reversed(work):
        for _ in range(2):  # the second one waits for the first one, in the hardware queue
            each.all_reduce(x)
    try:
        for each, _ in work:
            each.synchronize()
    except (TimeoutError, AbortedError) as error:
        return type(error).__name__
    return "over"


@pytest.mark.parametrize(("queues", "over"), [("1", False), (None, True)])
def test_streams_hold_each_other_up_in_a_common_queue(monkeypatch, queues, over):
    """A second each: the deadline of the operations that wait for each other."""
    monkeypatch.delenv(QUEUES, raising=False)
    if queues is not None:
        monkeypatch.setenv(QUEUES, queues)
    timeout_s = 20 if over else 1
    outcomes = run_ranks(calls_on_two_streams_in_other_orders, 2, timeout_s=timeout_s)
    assert [outcome == "over" for outcome in outcomes] == [over, over], outcomes


@pytest.mark.parametrize("threads", [False, True])
def test_ranks_that_pycoll_starts_have_all_hardware_queues(monkeypatch, threads):
    for before, found in ((None, "32"), ("4", "4")):
        monkeypatch.delenv(QUEUES, raising=False)
        if before is not None:
            monkeypatch.setenv(QUEUES, before)
        assert run_ranks(lambda _: os.environ[QUEUES], 2, threads=threads) == [found, found]


@pytest.mark.parametrize("function", ["launch", "scale"])
def test_launch_that_fails_frees_the_peers_at_once(function):
    def work(comm: pycoll.Communicator) -> float:
        x = DeviceArray.of(np.ones(100, np.float32))
        op = pycoll.premul(2.0) if function == "scale" else "sum"
        comm.all_reduce(x, op)
        comm.synchronize()
        start = time.monotonic()
        if comm.rank == 1:
            os.environ[FAIL] = f"{function}:cudaErrorLaunchOutOfResources"
            with pytest.raises(CudaError, match="cudaErrorLaunchOutOfResources"):
                comm.all_reduce(x, op)
        else:
            with pytest.raises(AbortedError, match="rank 1 .*cudaErrorLaunchOutOfResources"):
                comm.all_reduce(x, op)
                comm.synchronize()
        return time.monotonic() - start

    assert max(run_ranks(work, 2, timeout_s=20)) < 5


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (
            "export:CUDA_ERROR_NOT_PERMITTED",
            r"each other's device memory \(shared by IPC handles.* CUDA_ERROR_NOT_PERMITTED",
        ),
        ("lost_words:silently", r"pinned CPU memory \(rank 0: a word that a kernel of rank 0 "),
        ("store_words:cudaErrorIllegalAddress", r"pinned .*rank 0: cudaErrorIllegalAddress"),
    ],
)
def test_links_are_made_another_way_where_the_device_refuses_the_first_one(monkeypatch, told, says):
    """A second for words that are lost: the deadline of the test of links."""
    monkeypatch.setenv(FAIL, told)

    def work(comm: pycoll.Communicator) -> str:
        x = comm.empty(100, "f32", device=0)
        x.copy_from(np.full(100, comm.rank, np.float32))
        comm.all_reduce(x)
        assert (x.numpy() == 1).all()
        return explained(comm)

    for text in run_ranks(work, 2, timeout_s=20):
        assert re.search(says, text), text


def test_processes_that_take_turns_on_a_device_are_warned_once(monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_MPS", "0")
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_WORD_OPS", "0")

    def work(comm: pycoll.Communicator) -> tuple[list[str], str]:
        x = DeviceArray.of(np.ones(100, np.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                comm.all_reduce(x)
        return [str(each.message) for each in caught], explained(comm)

    for texts, text in run_ranks(work, 2, timeout_s=20):
        assert len(texts) == 1 and "their kernels take turns" in texts[0]
        assert "processes that take turns" in text
    for texts, text in run_ranks(work, 2, threads=True, timeout_s=20):
        assert not texts and "take turns" not in text


def test_ranks_that_are_threads_are_warned_where_hardware_queues_are_too_few(monkeypatch):
    def work(comm: pycoll.Communicator) -> list[str]:
        x = DeviceArray.of(np.ones(100, np.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm.barrier()  # the filters are those of all threads
            for _ in range(2):
                comm.all_reduce(x)
            comm.barrier()
        return [str(each.message) for each in caught]

    for queues, threads, num_warnings in (("2", True, 1), ("3", True, 0), ("2", False, 0)):
        monkeypatch.setenv(QUEUES, queues)
        texts = set(sum(run_ranks(work, 3, threads=threads, timeout_s=20), []))
        assert len(texts) == num_warnings, texts
        for text in texts:
            assert "3 ranks that are threads" in text and "2 hardware queues" in text
            assert QUEUES in text


def test_array_that_peers_cannot_access_is_not_registered_and_says_so(monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_EXPORT", "0")

    def work(comm: pycoll.Communicator) -> str:
        x = DeviceArray.of(np.ones(100, np.float32))
        with pytest.warns(RuntimeWarning, match="register: .* cannot be exported"):
            assert comm.register(x) is x
        comm.all_reduce(x)
        return explained(comm)

    for text in run_ranks(work, 2, timeout_s=20):
        assert "1 registered array is sent through slots" in text and "expandable" in text


def replays_that_overlap(comm: pycoll.Communicator) -> str:
    graphs = []
    x = DeviceArray.of(np.ones(5000, np.float32))
    comm.all_reduce(x)
    comm.synchronize()
    for _ in range(2):
        stream = _core.DeviceStream()
        x.stream = stream.handle
        stream.begin_capture()
        comm.all_reduce(x)
        graphs.append((stream, stream.end_capture()))
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
    for stream, graph in graphs:  # each on its stream, without an event between them
        stream.launch(graph)
    with pytest.raises(AbortedError) as caught:
        for stream, _ in graphs:
            stream.synchronize()
        comm.synchronize()
        comm.all_reduce(x)
    return str(caught.value)


def test_replays_that_overlap_are_an_error_on_all_ranks():
    for text in run_ranks(replays_that_overlap, 2, timeout_s=20):
        assert "began on its device beside another one" in text


def test_array_is_dropped_while_an_operation_waits_for_a_peer():
    """The peer comes once the array is dropped: a drop that waits would last to the deadline."""

    def work(comm: pycoll.Communicator) -> None:
        other = comm.split(0)
        assert other is not None
        x = DeviceArray.of(np.ones(100, np.float32))
        for each in (comm, other):
            each.all_reduce(x)
            each.synchronize()
        before = device_bytes()
        arrays = [DeviceArray.empty(100) for _ in range(3)]
        if comm.rank == 0:
            other.all_reduce(x)
            arrays.clear()
        comm.barrier()
        if comm.rank == 1:
            other.all_reduce(x)
        other.synchronize()
        arrays.clear()
        DeviceArray.empty(1)
        assert device_bytes() == before

    run_ranks(work, 2, timeout_s=10)


def test_unregister_waits_for_the_operation_that_uses_the_array():
    def work(comm: pycoll.Communicator) -> None:
        x = comm.empty(300_000, "f32", device=0)
        x.copy_from(np.full(300_000, comm.rank + 1, np.float32))
        comm.all_reduce(x)
        comm.synchronize()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
        comm.all_reduce(x, algorithm="two_shot/direct")
        comm.unregister(x)
        assert (x.numpy() == 3 * comm.size).all()

    run_ranks(work, 2, timeout_s=20)


def test_a_hundred_registered_arrays_take_little_memory():
    def work(comm: pycoll.Communicator) -> int:
        arrays = [DeviceArray.empty(100) for _ in range(100)]
        comm.all_reduce(arrays[0])
        comm.synchronize()
        imported = comm.size * sum(-(-x.nbytes // (2 << 20)) * (2 << 20) for x in arrays)
        before = device_bytes()
        for x in arrays:
            comm.register(x)
        took = device_bytes() - before
        arrays[3].copy_from(np.full(100, comm.rank + 1, np.float32))
        comm.all_reduce(arrays[3], out=arrays[77], algorithm="one_shot/direct")
        assert (arrays[77].numpy() == 3).all()
        return took - imported * (comm.size - 1) // comm.size

    assert max(run_ranks(work, 2, timeout_s=30)) < 64 << 20
