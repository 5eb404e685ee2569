"""send and recv that fail: the errors on both sides, in time; and a flood of messages."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import time

import numpy as np
import pytest
from worlds import Comm, impatient, on_ranks, run

from pycoll import AbortedError, CollectiveMismatchError, Error, PeerDiedError, run_ranks
from pycoll import TimeoutError as PycollTimeoutError

pytestmark = pytest.mark.ranks


@on_ranks(2)
def test_message_of_another_size_or_dtype_raises_on_both_sides(comm):
    sent = [(8, "u8"), (100_000, "u8"), (3, "f32"), (50_000, "f32")]
    for first, (count, dtype) in itertools.product(("send", "recv"), sent):
        part = comm.split(0)
        with pytest.raises(CollectiveMismatchError) as caught:
            if comm.rank == 0:
                if first == "recv":
                    time.sleep(0.1)
                part.send(np.zeros(count, np.uint8 if dtype == "u8" else np.float32), 1, 7)
                part.recv(np.zeros(3), 1)  # a small message had been sent well
            else:
                if first == "send":
                    time.sleep(0.1)
                part.recv(np.zeros(5, np.float32), 0, 7)
        with pytest.raises(Error):  # broken, and says so
            part.barrier()
        with pytest.raises(CollectiveMismatchError):
            part.send(np.zeros(1), 1)
        text = f"rank 0 sent {count} {dtype} with tag 7 to rank 1, whose receive expects 5 f32"
        assert text in str(caught.value)


@on_ranks(2, timeout_s=0.5)
def test_recv_timeout_names_what_it_waited_for(comm):
    if comm.rank == 1:
        time.sleep(1.2)
        text = r"0's recv\(4 f32, tag 3.* timed out waiting for rank 1"
        with pytest.raises(AbortedError, match=text):
            comm.send(np.zeros(1), 0, 3)
        return
    comm.send(np.zeros(1), 1, 9)
    with pytest.raises(PycollTimeoutError) as caught:
        comm.recv(np.zeros(4, np.float32), 1, 3)
    assert str(caught.value) == (
        "recv(4 f32, tag 3, from rank 1): rank 0 of 2 waited 0.5 s: no message with this tag "
        "has arrived"
    )


@pytest.mark.parametrize(("asynchronous", "threads"), [(False, False), (True, True)])
def test_send_timeout_of_a_large_message_names_the_peer(asynchronous, threads):
    def work(comm: Comm) -> str:
        if comm.rank == 1:
            time.sleep(1.2)
            return ""
        x = np.zeros(100_000, np.float32)
        with pytest.raises(PycollTimeoutError) as caught:
            if asynchronous:
                comm.send(x, 1, async_op=True).wait()
            else:
                comm.send(x, 1)
        return str(caught.value)

    text = run_ranks(impatient(work, 0.5), 2, threads=threads)[0]
    assert text.startswith("send(100000 f32, tag 0, to rank 1): rank 0 of 2 waited 0.5 s: no recei")


def test_killed_peer_raises_peer_died_in_time(tmp_path):
    """Ranks 0 to 3 wait for rank 4, each in another call."""
    clock = tmp_path / "killed"
    calls = [
        lambda comm, x: comm.recv(x, 4, 4),
        lambda comm, x: comm.recv_any(x, 4),
        lambda comm, x: comm.send(x, 4, 4),
        lambda comm, x: comm.recv(x, 4, 4, async_op=True).wait(),
    ]

    def work(comm: Comm) -> tuple[float, int, int]:
        comm.barrier()
        if comm.rank == 4:
            time.sleep(0.3)
            clock.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError) as caught:
            calls[comm.rank](comm, np.zeros(300_000))
        return time.monotonic(), caught.value.rank, caught.value.signal

    outcomes = run_ranks(work, 5, return_errors=True, timeout_s=20)
    for outcome in outcomes[:4]:
        assert not isinstance(outcome, Exception), outcome
        assert outcome[1:] == (4, signal.SIGKILL)
        assert outcome[0] - float(clock.read_text()) < 5


def test_receives_from_any_rank_end_when_one_rank_dies():
    """Ranks 0 and 1 would wait for each other until the deadline."""

    def work(comm: Comm) -> int:
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError) as caught:
            comm.recv_any(np.zeros(3))
        return caught.value.rank

    assert run_ranks(work, 3, return_errors=True, timeout_s=20)[:2] == [2, 2]


def test_what_a_killed_or_closed_peer_had_sent_is_received(tmp_path):
    def work(comm: Comm) -> None:
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


@on_ranks(2)
def test_close_with_pending_messages_ends_them(comm):
    part = comm.split(0)
    if comm.rank == 0:
        handles = [part.recv(np.zeros(3), 1, i, async_op=True) for i in range(5)]
        handles += [part.send(np.zeros(100_000), 1, i, async_op=True) for i in range(5)]
        start = time.monotonic()
        part.close()
        assert time.monotonic() - start < 10
        for handle in handles:
            assert handle.done()
            assert isinstance(handle.exception(), AbortedError)
            with pytest.raises(AbortedError):
                handle.wait()
    comm.barrier()


def flood(comm: Comm) -> int:
    num_messages, nbytes = 5_000, 2_000
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


def test_flood_of_unexpected_messages_is_bounded_and_delivered():
    # 10 MB were on their way: the budget of 1 MiB was copied, the rest is announced.
    assert run_ranks(flood, 3)[0] < 5_000
    run_ranks(flood, 3, threads=True)


Row = tuple[int, int, int, int]  # sender, receiver, tag, bytes


def content(seed: int, i: int, row: Row) -> np.ndarray:
    return np.random.default_rng([seed, i]).integers(0, 256, row[3], np.uint8)


def exchange(comm: Comm, seed: int, plan: list[Row]) -> None:
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
            x = content(seed, i, plan[i])
            pending.append((comm.send(x, plan[i][1], plan[i][2], async_op=True), None))
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
            i, y = received
            np.testing.assert_array_equal(y, content(seed, i, plan[i]), err_msg=f"{seed}")


def test_random_messages_match_the_oracle():
    """Every rank knows the whole plan; sends go in one random order, receives in another."""
    sizes = [0, 1, 8, 40, 41, 4000, 30_000, 65_536, 65_537, 300_000]
    worlds = [(2, "processes"), (3, "parts"), (4, "threads"), (5, "processes"), (5, "parts")]
    for seed, (n, kind) in enumerate(worlds):
        rng = random.Random(seed)
        plan = [
            (rng.randrange(n), rng.randrange(n), rng.randrange(3), rng.choice(sizes))
            for _ in range(60 * n)
        ]
        run(exchange, n, seed, plan, kind=kind)
