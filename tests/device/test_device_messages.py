"""send and recv of arrays of a device: through CPU memory, in the order of their stream."""

from __future__ import annotations

import numpy as np
import pytest
from cases import in_turn
from comm_cases import both
from device_ranks import run_ranks

import pycoll
from pycoll import UsageError
from pycoll.arrays.device import DeviceArray

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


def messages_of_devices_arrive_behind_what_their_stream_does(comm: pycoll.Communicator) -> None:
    peer = 1 - comm.rank
    for count in (0, 1, 777, 100_000):
        x = DeviceArray.of(np.full(count, comm.rank + 1, np.float32))
        got = DeviceArray.of(np.zeros(count, np.float32))
        comm.all_reduce(x)  # what is sent is its result, which is on its way still
        sent = comm.send(x, peer, async_op=True)
        assert comm.recv(got, peer) is got
        sent.wait()
        assert (got.numpy() == 3).all()


def messages_between_a_device_and_a_host_and_from_any_rank(comm: pycoll.Communicator) -> None:
    if comm.rank == 0:
        comm.send(DeviceArray.of(np.arange(5, dtype=np.int32)), 1)
        comm.send(np.arange(7, dtype=np.int32), 1, tag=3)
        return
    host = np.zeros(5, np.int32)
    comm.recv(host, 0)
    assert (host == np.arange(5)).all()
    x = DeviceArray.of(np.zeros(7, np.int32))
    assert comm.recv_any(x, tag=3) == 0
    assert (x.numpy() == np.arange(7)).all()


def receives_that_would_return_too_early_are_refused(comm: pycoll.Communicator) -> None:
    x = DeviceArray.of(np.zeros(3, np.float32))
    with pytest.raises(UsageError, match="blocks until the message has arrived"):
        comm.recv(x, 1 - comm.rank, async_op=True)
    with pytest.raises(UsageError, match="blocks until the message has arrived"), comm.coalesce():
        comm.recv(x, 1 - comm.rank)


@both
def test_messages_of_devices(threads):
    work = in_turn(
        messages_of_devices_arrive_behind_what_their_stream_does,
        messages_between_a_device_and_a_host_and_from_any_rank,
        receives_that_would_return_too_early_are_refused,
    )
    run_ranks(work, 2, threads=threads, timeout_s=30)
