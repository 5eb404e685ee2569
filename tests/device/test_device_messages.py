"""send and recv of arrays of a device: from device to device, in the order of their stream."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from cases import in_turn
from comm_cases import both
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

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

TIMEOUT_S = 30


def of(count: int, value: float) -> DeviceArray:
    return DeviceArray.of(np.full(count, value, np.float32))


def messages_of_devices_arrive_behind_what_their_stream_does(comm: pycoll.Communicator) -> None:
    peer = 1 - comm.rank
    for count in (0, 1, 777, 100_000, 3_000_001):
        x = of(count, comm.rank + 1)
        got = of(count, 0)
        comm.all_reduce(x)  # what is sent is its result, which is on its way still
        sent = comm.send(x, peer, async_op=True)
        assert comm.recv(got, peer) is got
        sent.wait()
        assert (got.numpy() == 3).all()


def sent_array_may_be_changed_at_once(comm: pycoll.Communicator) -> None:
    peer = 1 - comm.rank
    x, got = of(50_000, 0), of(50_000, -1)
    works = []
    for step in range(8):
        x.copy_from(np.full(50_000, step, np.float32))
        works.append(comm.send(x, peer, tag=step % 2, async_op=True))
    comm.barrier()
    for tag in (1, 0):  # by tag, and in order of the sends
        for step in range(tag, 8, 2):
            comm.recv(got, peer, tag=tag)
            assert (got.numpy() == step).all()
    for work in works:
        work.wait()


def receives_may_be_started_before_their_messages(comm: pycoll.Communicator) -> None:
    peer = 1 - comm.rank
    arrays = [of(70_000, -1) for _ in range(4)]
    works = [comm.recv(x, peer, tag=tag, async_op=True) for tag, x in enumerate(arrays)]
    for tag in reversed(range(4)):
        comm.send(of(70_000, 10 * peer + tag), peer, tag=tag)
    for tag, (x, work) in enumerate(zip(arrays, works, strict=True)):
        assert work.wait() is x
        assert (x.numpy() == 10 * comm.rank + tag).all()


def exchanges_in_a_group_and_to_itself(comm: pycoll.Communicator) -> None:
    peer = 1 - comm.rank
    got, own = of(90_000, -1), of(90_000, -1)
    with comm.coalesce():
        comm.send(of(90_000, comm.rank), peer)
        comm.send(of(90_000, 5 + comm.rank), comm.rank, tag=1)
        comm.recv(got, peer)
        comm.recv(own, comm.rank, tag=1)
    assert (got.numpy() == peer).all() and (own.numpy() == 5 + comm.rank).all()


def messages_between_a_device_and_a_host_and_from_any_rank(comm: pycoll.Communicator) -> None:
    for count in (5, 100_001):
        values = np.arange(count, dtype=np.int32)
        if comm.rank == 0:
            comm.send(DeviceArray.of(values), 1)
            comm.send(values, 1, tag=3)
            continue
        host = np.zeros(count, np.int32)
        comm.recv(host, 0)
        assert (host == values).all()
        x = DeviceArray.of(np.zeros(count, np.int32))
        assert comm.recv_any(x, tag=3) == 0
        assert (x.numpy() == values).all()


def blocking_sends_before_the_receives_do_not_deadlock(comm: pycoll.Communicator) -> None:
    peer = 1 - comm.rank
    got = of(200_000, -1)
    comm.send(of(200_000, comm.rank), peer)
    comm.recv(got, peer)
    assert (got.numpy() == peer).all()


def captured_messages_are_refused(comm: pycoll.Communicator) -> None:
    """On one rank: another thread may not use the default stream meanwhile."""
    if comm.rank == 0:
        stream = _core.DeviceStream()
        x = of(3, 0)
        x.stream = stream.handle
        stream.begin_capture()
        for call in (comm.send, comm.recv):
            with pytest.raises(UsageError, match="cannot be captured"):
                call(x, 1)
        stream.end_capture()
    comm.barrier()


all_messages = in_turn(
    messages_of_devices_arrive_behind_what_their_stream_does,
    sent_array_may_be_changed_at_once,
    receives_may_be_started_before_their_messages,
    exchanges_in_a_group_and_to_itself,
    messages_between_a_device_and_a_host_and_from_any_rank,
    blocking_sends_before_the_receives_do_not_deadlock,
    captured_messages_are_refused,
)


@both
def test_messages_of_devices(threads):
    run_ranks(all_messages, 2, threads=threads, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    "setting", [{"PYCOLL_PEER_MEMORY": "0"}, {"PYCOLL_DEVICE_THREADS_EXPORT": "0"}], ids=str
)
def test_messages_of_devices_that_cannot_map_each_others_memory(emulated, monkeypatch, setting):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    run_ranks(all_messages, 2, timeout_s=TIMEOUT_S)


def test_messages_between_several_devices_of_a_process(emulated, monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_COUNT", "3")

    def work(comm: pycoll.Communicator) -> None:
        for count in (1, 100_000):
            x = DeviceArray.of(np.full(count, comm.rank), device=comm.rank)
            got = DeviceArray.of(np.full(count, -1), device=comm.rank)
            sent = comm.send(x, (comm.rank + 1) % 3, async_op=True)
            comm.recv(got, (comm.rank - 1) % 3)
            sent.wait()
            assert (got.numpy() == (comm.rank - 1) % 3).all()

    run_ranks(work, 3, threads=True, timeout_s=TIMEOUT_S)


def device_maps() -> int:
    return sum("pycoll-device" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_receiver_maps_the_senders_memory_once_and_close_frees_it(emulated):
    def work(comm: pycoll.Communicator) -> None:
        def exchange(part: pycoll.Communicator) -> int:
            before = device_maps()
            for count in (600_000, 900_000, 10, 600_000):
                x = of(count, 1)
                part.send(x, 1) if part.rank == 0 else part.recv(x, 0)
            del x
            gc.collect()
            return device_maps() - before

        counts = []
        for _ in range(3):
            part = comm.split(0)
            assert part is not None
            mapped = exchange(part)
            assert 1 <= mapped <= 3, mapped  # 2 MiB and 4 MiB, and an array that is not freed yet
            part.close()
            gc.collect()
            counts.append((device_maps(), len(os.listdir("/proc/self/fd"))))
        assert counts[2] <= counts[1], counts

    run_ranks(work, 2, timeout_s=TIMEOUT_S)


# --- errors


def test_receive_of_another_size_is_a_mismatch():
    def work(comm: pycoll.Communicator) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            comm.send(of(100_000, 0), 1) if comm.rank == 0 else comm.recv(of(99_999, 0), 0)
        return str(caught.value)

    for text in run_ranks(work, 2, timeout_s=TIMEOUT_S):
        assert "100000" in text or "400000" in text, text


@pytest.mark.parametrize("how", ["kill", "abort", "late"])
def test_messages_end_when_their_peer_does_not_come(how, ranks_may_be_killed):
    """Both kinds of operation wait: rank 0 sends, rank 2 receives."""
    expected = {"kill": PeerDiedError, "abort": AbortedError, "late": (TimeoutError, AbortedError)}

    def work(comm: pycoll.Communicator) -> float:
        other = comm.split(0)
        assert other is not None
        x = of(500_000, 1)
        comm.all_reduce(x)
        start = time.monotonic()
        if comm.rank == 1:
            time.sleep(0.3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "abort":
                comm.abort("no more")
            time.sleep(1.5 if how == "late" else 0)
        else:
            with pytest.raises(expected[how], match="rank 1"):
                comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 1)
        took_s = time.monotonic() - start
        world = comm.shrink(20) if how == "kill" else other
        world.all_reduce(y := of(10, 1))
        assert (y.numpy() == world.size).all()
        return took_s

    timeout_s = 1.0 if how == "late" else TIMEOUT_S
    outcomes = run_ranks(work, 3, return_errors=True, timeout_s=timeout_s)
    assert max(outcomes[0], outcomes[2]) < 10, outcomes


def test_copy_that_fails_is_an_error_of_both_ends(emulated):
    def work(comm: pycoll.Communicator) -> None:
        x = of(100_000, 1)
        comm.barrier()
        if comm.rank == 1:
            os.environ["PYCOLL_DEVICE_THREADS_FAIL"] = "copy:cudaErrorUnknown"
        with pytest.raises((AbortedError, CudaError), match="cudaErrorUnknown"):
            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)

    run_ranks(work, 2, timeout_s=TIMEOUT_S)
