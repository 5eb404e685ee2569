"""send and recv: tags, order, sizes around the thresholds, any source, asynchronous ones."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from comm_cases import both

import pycoll
from pycoll import UsageError, run_ranks

pytestmark = pytest.mark.ranks

EAGER_BYTES = 64 << 10
SIZES = [0, 1, 40, 41, 1000, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 100_000, 3_000_001]


@pytest.fixture(params=["direct", "parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How processes move large messages: from memory to memory, or through the mailbox."""
    if request.param == "parts":
        monkeypatch.setenv("PYCOLL_PEER_MEMORY", "0")
    return request.param


def payload(sender: int, tag: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([sender, tag, nbytes]).integers(0, 256, nbytes, np.uint8)


@both
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_send_recv_every_size_arrives_whole(n, threads, way):
    def work(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        for tag, nbytes in enumerate(SIZES):
            y = np.zeros(nbytes, np.uint8)
            sent = comm.send(payload(comm.rank, tag, nbytes), right, tag, async_op=True)
            assert comm.recv(y, left, tag) is y
            assert sent.wait() is None
            np.testing.assert_array_equal(y, payload(left, tag, nbytes))

    run_ranks(work, n, threads=threads, timeout_s=20)


@both
@pytest.mark.parametrize("nbytes", [8, EAGER_BYTES, 200_000])
def test_recv_tags_in_another_order_than_sent_match(nbytes, threads, way):
    def work(comm: pycoll.Communicator) -> None:
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

    run_ranks(work, 2, threads=threads, timeout_s=20)


@both
def test_send_same_tag_keeps_the_order_of_mixed_sizes(threads, way):
    def work(comm: pycoll.Communicator) -> None:
        sizes = [int(s) for s in np.random.default_rng(1).integers(0, 160_000, 60)]
        if comm.rank == 0:
            for i, nbytes in enumerate(sizes):
                comm.send(payload(0, i, nbytes), 1)
        else:
            for i, nbytes in enumerate(sizes):
                y = np.empty(nbytes, np.uint8)
                comm.recv(y, 0)
                np.testing.assert_array_equal(y, payload(0, i, nbytes))

    run_ranks(work, 2, threads=threads, timeout_s=20)


@both
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("nbytes", [8, 100_000, 4_000_000])
def test_send_first_on_all_ranks_does_not_deadlock(n, nbytes, threads, way):
    def work(comm: pycoll.Communicator) -> None:
        y = np.empty(nbytes, np.uint8)
        for i in range(3):
            comm.send(payload(comm.rank, i, nbytes), (comm.rank + 1) % n, i)
            comm.recv(y, (comm.rank - 1) % n, i)
            np.testing.assert_array_equal(y, payload((comm.rank - 1) % n, i, nbytes))

    run_ranks(work, n, threads=threads, timeout_s=20)


@both
def test_recv_any_source_gets_every_message_once(threads, way):
    num_each = 50

    def work(comm: pycoll.Communicator) -> None:
        n = comm.size
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

    run_ranks(work, 5, threads=threads, timeout_s=20)


@both
@pytest.mark.parametrize("n", [1, 3])
def test_send_to_oneself_is_buffered(n, threads):
    def work(comm: pycoll.Communicator) -> None:
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

    run_ranks(work, n, threads=threads, timeout_s=10)


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


@both
def test_async_ones_progress_while_nobody_waits(threads, way):
    def work(comm: pycoll.Communicator) -> None:
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

    run_ranks(work, 2, threads=threads, timeout_s=20)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.send(np.zeros(3), 2), r"peer is 2, expected a rank in 0\.\.1"),
        (lambda c: c.send(np.zeros(3), None), "send needs a peer"),
        (lambda c: c.send(np.zeros(3), -1), "peer is -1"),
        (lambda c: c.recv(np.zeros(3), -2), "peer is -2"),
        (lambda c: c.recv(np.zeros(3), "left"), "peer is 'left'"),
        (lambda c: c.send(np.zeros(3), 1, -1), "tag is -1"),
        (lambda c: c.send(np.zeros(3), 1, 2**31), "tag is 2147483648"),
        (lambda c: c.send(np.zeros(3), 1, 1.5), r"tag is 1\.5"),
        (lambda c: c.send(np.zeros((3, 3))[:, 1], 1), "not contiguous"),
        (lambda c: c.recv(b"const", 1), "read-only"),
        (lambda c: c.recv(None, 1), "recv needs an array x"),
        (lambda c: c.recv(np.zeros(3), 1, 0, True), "at most 3 positional"),
        (lambda c: c.recv(np.zeros(3), root=1), "no argument 'root'"),
    ],
)
def test_send_recv_refuses_what_makes_no_sense(call, message):
    def work(comm: pycoll.Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            call(comm)
        if comm.rank == 0:  # nothing was sent, nothing is broken
            comm.send(b"abc", 1)
        else:
            assert comm.recv(bytearray(3), 0) == b"abc"

    run_ranks(work, 2, threads=True, timeout_s=10)
