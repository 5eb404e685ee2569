"""send and recv: tags, order, sizes around the thresholds, any source, asynchronous ones."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from comm_cases import check_refused
from worlds import on_ranks

import pycoll

pytestmark = pytest.mark.ranks

EAGER_BYTES = 64 << 10
SIZES = [0, 1, 40, 41, 1000, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 100_000, 3_000_001]
each_way = on_ranks(2, parts=[2])


def payload(sender: int, tag: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([sender, tag, nbytes]).integers(0, 256, nbytes, np.uint8)


@on_ranks(2, processes=[5], threads=[3, 8], parts=[2, 3])
def test_send_recv_every_size_arrives_whole(comm):
    n = comm.size
    right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
    for tag, nbytes in enumerate(SIZES):
        y = np.zeros(nbytes, np.uint8)
        sent = comm.send(payload(comm.rank, tag, nbytes), right, tag, async_op=True)
        assert comm.recv(y, left, tag) is y
        assert sent.wait() is None
        np.testing.assert_array_equal(y, payload(left, tag, nbytes))


@each_way
def test_recv_tags_in_another_order_than_sent_match(comm):
    for nbytes in (8, EAGER_BYTES, 200_000):
        tags = list(range(40))
        if comm.rank == 0:
            works = [comm.send(payload(0, t, nbytes), 1, t, async_op=True) for t in tags]
            for handle in works:
                handle.wait()
        else:
            y = np.empty(nbytes, np.uint8)
            for tag in reversed(tags):
                comm.recv(y, 0, tag)
                np.testing.assert_array_equal(y, payload(0, tag, nbytes))


@each_way
def test_send_same_tag_keeps_the_order_of_mixed_sizes(comm):
    sizes = [int(s) for s in np.random.default_rng(1).integers(0, 160_000, 60)]
    for i, nbytes in enumerate(sizes):
        if comm.rank == 0:
            comm.send(payload(0, i, nbytes), 1)
        else:
            y = np.empty(nbytes, np.uint8)
            comm.recv(y, 0)
            np.testing.assert_array_equal(y, payload(0, i, nbytes))


@on_ranks(2, processes=[5], threads=[3], parts=[2, 5])
def test_send_first_on_all_ranks_does_not_deadlock(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for nbytes in (8, 100_000, 4_000_000):
        y = np.empty(nbytes, np.uint8)
        for i in range(2):
            comm.send(payload(comm.rank, i, nbytes), right, i)
            comm.recv(y, left, i)
            np.testing.assert_array_equal(y, payload(left, i, nbytes))


@on_ranks(processes=[5], threads=[4], parts=[3])
def test_recv_any_source_gets_every_message_once(comm):
    n, num_each = comm.size, 50
    if comm.rank != 0:
        for i in range(num_each):
            comm.send(payload(comm.rank, i, 10 if i % 7 else 90_000), 0, i % 7 and 1)
        return
    next_one = {(rank, tag): 0 for rank in range(1, n) for tag in (0, 1)}
    indices = {tag: [i for i in range(num_each) if (i % 7 and 1) == tag] for tag in (0, 1)}
    for tag in (1, 0):
        y = np.empty(10 if tag else 90_000, np.uint8)
        for i in range(len(indices[tag]) * (n - 1)):
            if i % 3 == 0:
                handle = comm.recv(y, pycoll.ANY_SOURCE, tag, async_op=True)
                assert handle.wait() is y
                source = handle.source
            else:
                source = comm.recv_any(y, tag)
            sequence = indices[tag][next_one[source, tag]]
            next_one[source, tag] += 1
            np.testing.assert_array_equal(y, payload(source, sequence, len(y)))


@on_ranks(1, 3)
def test_send_to_oneself_is_buffered(comm):
    for nbytes in (0, 8, 1_000_000):
        x, y = payload(comm.rank, 1, nbytes), np.empty(nbytes, np.uint8)
        comm.send(x, comm.rank, 5)
        assert comm.recv_any(y, 5) == comm.rank
        np.testing.assert_array_equal(x, y)
        y[:] = 0
        receive = comm.recv(y, comm.rank, 6, async_op=True)
        assert receive.source is None
        comm.send(x, comm.rank, 6)
        assert receive.wait(5) is y
        assert receive.source == comm.rank
        np.testing.assert_array_equal(x, y)


@on_ranks(2)
def test_async_recv_does_not_hold_up_a_later_send(comm):
    peer = 1 - comm.rank
    for nbytes in (8, 100_000):
        y = np.empty(nbytes, np.uint8)
        first = comm.recv(y, peer, 1, async_op=True)  # its message comes last
        x, z = payload(comm.rank, 2, nbytes), np.empty(nbytes, np.uint8)
        second = comm.send(x, peer, 2, async_op=True)
        comm.recv(z, peer, 2)
        second.wait()
        assert not first.done()
        comm.barrier()
        comm.send(payload(comm.rank, 1, nbytes), peer, 1)
        first.wait()
        np.testing.assert_array_equal(y, payload(peer, 1, nbytes))
        np.testing.assert_array_equal(z, payload(peer, 2, nbytes))


@each_way
def test_async_ones_progress_while_no_rank_waits(comm):
    nbytes = 2_000_000
    y = np.empty(nbytes, np.uint8)
    if comm.rank == 0:
        handle = comm.send(payload(0, 1, nbytes), 1, async_op=True)
    else:
        handle = comm.recv(y, 0, async_op=True)
    end = time.monotonic() + 10
    while not threading.Event().wait(0.01) and time.monotonic() < end:
        if handle._core.finished:  # looks, and moves nothing on
            break
    assert handle.done()
    if comm.rank == 1:
        np.testing.assert_array_equal(y, payload(0, 1, nbytes))


@on_ranks(4)
def test_send_recv_next_to_collectives_and_queued_ones(comm):
    peer = comm.rank ^ 1
    for i in range(20):
        x, y = payload(comm.rank, i, 50_000), np.empty(50_000, np.uint8)
        total = np.ones(2000, np.float32)
        queued = comm.all_reduce(total, async_op=True)
        receive = comm.recv(y, peer, i, async_op=True)
        comm.all_reduce(np.ones(10))
        comm.send(x, peer, i)
        queued.wait()
        receive.wait()
        assert (total == comm.size).all()
        np.testing.assert_array_equal(y, payload(peer, i, 50_000))


REFUSED = {
    "beyond": (lambda c: c.send(np.zeros(3), 2), r"peer is 2, expected a rank in 0\.\.1"),
    "nowhere": (lambda c: c.send(np.zeros(3), None), "send needs a peer"),
    "any": (lambda c: c.send(np.zeros(3), -1), "peer is -1"),
    "from_below": (lambda c: c.recv(np.zeros(3), -2), "peer is -2"),
    "peer_word": (lambda c: c.recv(np.zeros(3), "left"), "peer is 'left'"),
    "negative_tag": (lambda c: c.send(np.zeros(3), 1, -1), "tag is -1"),
    "large_tag": (lambda c: c.send(np.zeros(3), 1, 2**31), "tag is 2147483648"),
    "fractional_tag": (lambda c: c.send(np.zeros(3), 1, 1.5), r"tag is 1\.5"),
    "strided": (lambda c: c.send(np.zeros((3, 3))[:, 1], 1), "not contiguous"),
    "read_only": (lambda c: c.recv(b"const", 1), "read-only"),
    "no_array": (lambda c: c.recv(None, 1), "recv needs an array x"),
    "positional": (lambda c: c.recv(np.zeros(3), 1, 0, True), "at most 3 positional"),
    "unknown": (lambda c: c.recv(np.zeros(3), root=1), "no argument 'root'"),
}


@on_ranks(threads=[2])
def test_send_recv_refuses_wrong_arguments_and_sends_nothing(comm):
    check_refused(REFUSED, comm)
    if comm.rank == 0:  # nothing was sent, nothing is broken
        comm.send(b"abc", 1)
    else:
        assert comm.recv(bytearray(3), 0) == b"abc"
