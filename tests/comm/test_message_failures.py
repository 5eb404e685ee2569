"""send and recv that cannot end well: who learns what, in time; and a flood that nobody wants."""

from __future__ import annotations

import os
import random
import resource
import signal
import time

import numpy as np
import pytest
from comm_cases import both

import pycoll
from pycoll import AbortedError, CollectiveMismatchError, Error, PeerDiedError, run_ranks
from pycoll import TimeoutError as PycollTimeoutError

pytestmark = pytest.mark.ranks


@both
@pytest.mark.parametrize("nbytes", [8, 100_000])
@pytest.mark.parametrize("first", ["send", "recv"])
def test_message_of_another_size_or_dtype_raises_on_both_sides(first, nbytes, threads):
    def work(comm: pycoll.Communicator) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            if comm.rank == 0:
                if first == "recv":
                    time.sleep(0.1)
                comm.send(np.zeros(nbytes, np.uint8), 1, 7)
                comm.recv(np.zeros(3), 1)  # a small message had been sent well
            else:
                if first == "send":
                    time.sleep(0.1)
                comm.recv(np.zeros(5, np.float32), 0, 7)
        with pytest.raises(Error):  # broken, and says so
            comm.barrier()
        with pytest.raises(CollectiveMismatchError):
            comm.send(np.zeros(1), 1)
        return str(caught.value)

    for text in run_ranks(work, 2, threads=threads, timeout_s=10):
        assert f"rank 0 sent {nbytes} u8 with tag 7 to rank 1, whose receive expects 5 f32" in text


@both
def test_recv_timeout_names_what_it_waited_for(threads):
    def work(comm: pycoll.Communicator) -> str:
        if comm.rank == 1:
            time.sleep(1.2)
            with pytest.raises(
                AbortedError, match=r"0's recv\(4 f32, tag 3.* timed out waiting for rank 1"
            ):
                comm.send(np.zeros(1), 0, 3)
            return ""
        comm.send(np.zeros(1), 1, 9)
        with pytest.raises(PycollTimeoutError) as caught:
            comm.recv(np.zeros(4, np.float32), 1, 3)
        return str(caught.value)

    text = run_ranks(work, 2, threads=threads, timeout_s=0.5)[0]
    assert text == (
        "recv(4 f32, tag 3, from rank 1): rank 0 of 2 waited 0.5 s: no message with this tag "
        "has arrived"
    )


@both
@pytest.mark.parametrize("asynchronous", [False, True])
def test_send_timeout_of_a_large_message_names_the_peer(asynchronous, threads):
    def work(comm: pycoll.Communicator) -> str:
        if comm.rank == 1:
            time.sleep(1.5)
            return ""
        x = np.zeros(100_000, np.float32)
        with pytest.raises(PycollTimeoutError) as caught:
            if asynchronous:
                comm.send(x, 1, async_op=True).wait()
            else:
                comm.send(x, 1)
        return str(caught.value)

    text = run_ranks(work, 2, threads=threads, timeout_s=0.5)[0]
    assert text.startswith("send(100000 f32, tag 0, to rank 1): rank 0 of 2 waited 0.5 s: no recei")


@pytest.mark.parametrize("how", ["recv", "recv_any", "send", "async"])
def test_killed_peer_raises_peer_died_in_time(how, tmp_path):
    clock = tmp_path / "killed"

    def work(comm: pycoll.Communicator) -> tuple[float, int, int]:
        small, large = np.zeros(3), np.zeros(300_000)
        if comm.rank == 1:
            comm.send(small + 5, 0, 1)
            comm.send(small, 0, 2)
            time.sleep(0.3)
            clock.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(small, 1, 2)
        with pytest.raises(PeerDiedError) as caught:
            if how == "recv":
                comm.recv(large, 1, 4)
            elif how == "recv_any":
                comm.recv_any(large, 4)
            elif how == "send":
                comm.send(large, 1, 4)
            else:
                comm.recv(large, 1, 4, async_op=True).wait()
        return time.monotonic(), caught.value.rank, caught.value.signal

    outcome = run_ranks(work, 2, return_errors=True, timeout_s=20)[0]
    assert not isinstance(outcome, Exception), outcome
    assert outcome[1:] == (1, signal.SIGKILL)
    assert outcome[0] - float(clock.read_text()) < 1


def test_what_a_killed_or_closed_peer_had_sent_is_received(tmp_path):
    def work(comm: pycoll.Communicator) -> None:
        if comm.rank == 1:
            for i in range(20):
                comm.send(np.full(100, i), 0, i)
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 2:
            comm.send(np.full(100, 99), 0, 99)
            comm.close()
            return
        time.sleep(0.3)
        y = np.zeros(100, np.int64)
        for i in reversed(range(20)):
            assert (comm.recv(y, 1, i) == i).all()
        assert comm.recv_any(y, 99) == 2
        with pytest.raises(PeerDiedError):
            comm.recv_any(y, 5)

    outcome = run_ranks(work, 3, return_errors=True, timeout_s=20)[0]
    assert outcome is None, outcome


@both
def test_close_with_pending_messages_ends_them(threads):
    def work(comm: pycoll.Communicator) -> None:
        part = comm.split(0)
        if comm.rank == 0:
            handles = [part.recv(np.zeros(3), 1, i, async_op=True) for i in range(5)]
            handles += [part.send(np.zeros(100_000), 1, i, async_op=True) for i in range(5)]
            start = time.monotonic()
            part.close()
            assert time.monotonic() - start < 1
            for handle in handles:
                assert handle.done()
                assert isinstance(handle.exception(), AbortedError)
                with pytest.raises(AbortedError):
                    handle.wait()
        comm.barrier()

    run_ranks(work, 2, threads=threads, timeout_s=10)


@both
def test_flood_of_unexpected_messages_is_bounded_and_delivered(threads):
    num_messages, nbytes = 10_000, 2_000

    def work(comm: pycoll.Communicator) -> int:
        y = np.empty(nbytes, np.uint8)
        if comm.rank == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            comm.recv(np.zeros(1), 2, 5)  # drains what rank 1 sends meanwhile
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            for i in range(num_messages):
                comm.recv(y, 1, 1)
                assert y[0] == i % 251
            return held
        if comm.rank == 1:
            handles = []
            for i in range(num_messages):
                x = np.full(nbytes, i % 251, np.uint8)
                handles.append(comm.send(x, 0, 1, async_op=True))
            for handle in handles:
                handle.wait()
        else:
            time.sleep(0.5)
            comm.send(np.zeros(1), 0, 5)
        return 0

    held_kib = run_ranks(work, 3, threads=threads, timeout_s=30)[0]
    if not threads:
        # 20 MB were on their way: the budget of 1 MiB was copied, the rest is announced.
        assert held_kib < 10_000


@both
@pytest.mark.parametrize("seed", range(4))
def test_random_messages_match_the_oracle(seed, threads, monkeypatch):
    """Every rank knows the whole plan; sends go in one random order, receives in another."""
    if seed % 2:
        monkeypatch.setenv("PYCOLL_PEER_MEMORY", "0")
    n = 2 + seed
    rng = random.Random(seed)
    sizes = [0, 1, 8, 40, 41, 4000, 30_000, 65_536, 65_537, 300_000]
    plan = [
        (rng.randrange(n), rng.randrange(n), rng.randrange(3), rng.choice(sizes))
        for _ in range(60 * n)
    ]

    def content(i: int) -> np.ndarray:
        return np.random.default_rng([seed, i]).integers(0, 256, plan[i][3], np.uint8)

    def work(comm: pycoll.Communicator) -> None:
        mine = random.Random(seed * 100 + comm.rank)
        sends = [i for i, row in enumerate(plan) if row[0] == comm.rank]
        lanes: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(plan):
            if row[1] == comm.rank:
                lanes.setdefault((row[0], row[2]), []).append(i)
        pending = []
        while sends or lanes:
            if sends and (not lanes or mine.random() < 0.5):
                i = sends.pop(0)
                pending.append((comm.send(content(i), plan[i][1], plan[i][2], async_op=True), None))
            else:
                lane = mine.choice(list(lanes))
                i = lanes[lane].pop(0)
                if not lanes[lane]:
                    del lanes[lane]
                y = np.empty(plan[i][3], np.uint8)
                pending.append((comm.recv(y, *lane, async_op=True), (i, y)))
            if mine.random() < 0.02:
                comm.send(np.zeros(1), comm.rank, 9)
                comm.recv(np.zeros(1), comm.rank, 9)
            if mine.random() < 0.1:
                mine.choice(pending)[0].done()
        mine.shuffle(pending)
        for handle, received in pending:
            handle.wait()
            if received is not None:
                np.testing.assert_array_equal(received[1], content(received[0]), err_msg=f"{seed}")

    run_ranks(work, n, threads=threads, timeout_s=30)
