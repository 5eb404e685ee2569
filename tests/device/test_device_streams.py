"""Streams, asynchronous operations, captures."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cases import in_turn
from comm_cases import both
from device_ranks import run_ranks

import pycoll
from pycoll import CudaError, UsageError, _core
from pycoll.arrays.device import DeviceArray

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

TIMEOUT_S = 60


def capture_of_more_than_a_launch_is_refused_and_harmless(comm: pycoll.Communicator) -> None:
    stream = _core.DeviceStream()
    x = DeviceArray.of(np.ones(8, np.float32), stream=stream.handle)
    out = DeviceArray.empty(8 * comm.size, "f32", stream=stream.handle)
    stream.begin_capture()
    with pytest.raises(UsageError, match="before the capture"):
        comm.all_reduce(x)  # the first one: no links yet
    stream.end_capture()
    comm.all_reduce(x)
    send = [4] * comm.size
    stream.begin_capture()
    with pytest.raises(UsageError, match="cannot be captured"):
        comm.all_to_all(x, out=out.part(0, 8), send_counts=send, recv_counts=send)
    with pytest.raises((UsageError, CudaError)):
        comm.all_gather(x, counts=[8] * comm.size, out=out)
    stream.end_capture()
    comm.all_reduce(x)
    assert (x.numpy() == comm.size**2).all()


def operations_on_several_streams_come_in_their_order(comm: pycoll.Communicator) -> None:
    streams = [_core.DeviceStream() for _ in range(3)]
    x = DeviceArray.of(np.full(50_000, comm.rank, np.float32))
    for step in range(12):
        x.stream = streams[step % 3].handle
        comm.all_reduce(x, "avg" if step else "sum")
    comm.synchronize()
    assert (x.numpy() == 1).all()


def async_work_runs_beside_the_stream(comm: pycoll.Communicator) -> None:
    arrays = [DeviceArray.of(np.full(1000 * (i + 1), comm.rank + i)) for i in range(4)]
    works = [comm.all_reduce(x, async_op=True) for x in arrays]
    for i, handle in enumerate(works):
        assert handle.wait() is arrays[i]  # the stream waits, not the host
        assert (arrays[i].numpy() == 2 * i + 1).all()
    for handle in works:
        handle.wait(timeout_s=TIMEOUT_S)
        assert handle.done() and handle.exception() is None
    gathered = comm.all_gather(arrays[0], async_op=True).wait()
    assert gathered.numpy().shape == (2000,)


def async_work_keeps_its_arrays(comm: pycoll.Communicator) -> None:
    for step in range(20):
        comm.all_reduce(DeviceArray.of(np.full(30_000, step)), async_op=True)
    comm.synchronize()


def captured_operations_replay_mixed_with_eager_ones(comm: pycoll.Communicator) -> None:
    n = comm.size
    stream = _core.DeviceStream()
    x = DeviceArray.of(np.ones(5000, np.float32), stream=stream.handle)
    y = DeviceArray.of(np.ones(300, np.int64), stream=stream.handle)
    out = DeviceArray.empty((n * 300,), "i64", stream=stream.handle)
    comm.all_reduce(x, "avg")
    comm.all_gather(y, out=out)
    comm.synchronize()
    stream.begin_capture()
    comm.all_reduce(x)
    comm.all_gather(y, out=out)
    comm.all_reduce(x, "avg")
    graph = stream.end_capture()
    own = np.arange(n)
    for step in range(30):
        x.copy_from(np.full(5000, step + comm.rank, np.float32))
        y.copy_from(np.full(300, step + comm.rank, np.int64))
        stream.launch(graph)
        if step % 3 == 0:
            comm.all_reduce(x, "avg")  # eager, behind the replay
        assert (x.numpy() == np.sum(step + own)).all()
        np.testing.assert_array_equal(out.numpy().reshape(n, 300)[:, 0], step + own)


def capture_with_async_work_joins_its_stream(comm: pycoll.Communicator) -> None:
    stream = _core.DeviceStream()
    x = DeviceArray.of(np.ones(100, np.float32), stream=stream.handle)
    comm.all_reduce(x, "avg", async_op=True).wait()
    comm.synchronize()
    stream.begin_capture()
    comm.all_reduce(x, async_op=True).wait()
    graph = stream.end_capture()
    for _ in range(3):
        stream.launch(graph)
    stream.synchronize()
    assert (x.numpy() == comm.size**3).all()


def async_work_on_a_device_behind_one_on_the_host(comm: pycoll.Communicator) -> None:
    on_host, on_device = np.ones(1000), DeviceArray.of(np.ones(100, np.float32))
    comm.all_reduce(on_device)
    if comm.rank == 1:
        time.sleep(0.3)  # what is queued on rank 0 waits, and looks for signals
    works = [comm.all_reduce(x, async_op=True) for x in (on_host, on_device)]
    for handle in works:
        handle.wait()
    assert (on_host == 2).all() and (on_device.numpy() == 4).all()


def pieces_replay_in_random_order(comm: pycoll.Communicator, num_replays: int = 200) -> None:
    """Graphs of one operation each, which work on each other's results."""
    n, count = comm.size, 300
    stream = _core.DeviceStream()
    a = DeviceArray.of(np.arange(count) + comm.rank, stream=stream.handle)
    gathered = DeviceArray.of(np.zeros(n * count, np.int64), stream=stream.handle)
    operations = [
        lambda: comm.all_reduce(a),
        lambda: comm.all_gather(a, out=gathered),
        lambda: comm.reduce_scatter(gathered, out=a),
        lambda: comm.broadcast(a, n - 1),
    ]
    for operation in operations:
        operation()
    comm.synchronize()
    comm.barrier()
    graphs = []
    for operation in operations:
        stream.begin_capture()
        operation()
        graphs.append(stream.end_capture())
    a.copy_from(np.arange(count) + comm.rank)
    gathered.copy_from(np.zeros(n * count, np.int64))
    # The arrays of all ranks; numbers wrap around as on the device.
    each = np.arange(count) + np.arange(n)[:, None]
    whole = np.zeros((n, n, count), np.int64)
    for step, piece in enumerate(np.random.default_rng(7).integers(len(graphs), size=num_replays)):
        stream.launch(graphs[piece])
        if piece == 0:
            each = np.repeat(each.sum(0)[None], n, 0)
        elif piece == 1:
            whole = np.repeat(each[None], n, 0)
        elif piece == 2:
            each = whole.sum(0)
        else:
            each = np.repeat(each[-1:], n, 0)
        if step % 50 == 49:
            np.testing.assert_array_equal(a.numpy(), each[comm.rank], err_msg=str(step))
            found = gathered.numpy().reshape(n, count)
            np.testing.assert_array_equal(found, whole[comm.rank], err_msg=str(step))


@pytest.mark.soak
@pytest.mark.timeout(900)
@both
def test_pieces_replay_ten_thousand_times(threads):
    """Ten seconds: each replay starts the threads of a launch."""
    run_ranks(pieces_replay_in_random_order, 3, 10_000, threads=threads, timeout_s=TIMEOUT_S)


@both
def test_operations_keep_the_order_of_streams_captures_and_async_work(threads):
    works = [
        operations_on_several_streams_come_in_their_order,
        async_work_runs_beside_the_stream,
        async_work_keeps_its_arrays,
        captured_operations_replay_mixed_with_eager_ones,
        pieces_replay_in_random_order,
        async_work_on_a_device_behind_one_on_the_host,
    ]
    # Ranks that are threads share the device: one may not allocate while another one captures, and
    # one that frees memory waits for the device (as cudaFree does), where a replay waits for it.
    if not threads:
        works.insert(0, capture_of_more_than_a_launch_is_refused_and_harmless)
        works.append(capture_with_async_work_joins_its_stream)
    run_ranks(in_turn(*works), 2, threads=threads, timeout_s=TIMEOUT_S)
