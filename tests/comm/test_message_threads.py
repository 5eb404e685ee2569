"""Threads of a rank start the first messages of a communicator at the same time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

ROUNDS, COUNT = 60, 30_000  # of 8 bytes: more than a mailbox has


def first_messages(comm):
    """Two threads send and receive by turns, each with a tag of its own."""
    peer, wrong = 1 - comm.rank, 0
    for turn in range(ROUNDS):
        fresh = comm.split(0)
        together = threading.Barrier(2)
        into = [np.zeros(COUNT) for _ in range(2)]

        def exchange(tag, fresh=fresh, together=together, into=into, turn=turn):
            together.wait(10)
            coming = fresh.recv(into[tag], peer, tag, async_op=True)
            fresh.send(np.full(COUNT, turn + tag, float), peer, tag, async_op=True).wait()
            coming.wait()

        threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong += sum(not (into[tag] == turn + tag).all() for tag in range(2))
        fresh.close()
    return wrong


def test_first_asynchronous_messages_of_two_threads_do_not_race():
    """A second. The race ended the process: two threads started the message thread."""
    assert pycoll.run_ranks(first_messages, 2, timeout_s=20) == [0, 0]
