"""How ranks write and read each other's lines is measured; the bytes are the same in each way."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks

ALGORITHMS = ("ring/simple", "tree/simple", "one_shot/simple", "two_shot/simple")
COUNT = 300_007  # of f32: several slots, and a part of a line at the end
PERIOD = 256  # operations between two measurements of a rank's writes (peer_loads.h)


def reduced(comm: pycoll.Communicator) -> list[str]:
    """The algorithms with a wrong result."""
    comm.register_after = 0  # registered arrays have no slots
    ranks = [np.random.default_rng(rank).random(COUNT, np.float32) for rank in range(comm.size)]
    wrong = []
    for algorithm in ALGORITHMS:
        for _ in range(3):
            out = comm.all_reduce(ranks[comm.rank].copy(), algorithm=algorithm)
            if not np.allclose(out, sum(ranks), rtol=1e-6):
                wrong.append(algorithm)
    parts = comm.all_gather(ranks[comm.rank], algorithm="ring/simple")
    return wrong if np.array_equal(parts.ravel(), np.concatenate(ranks)) else [*wrong, "gather"]


@pytest.mark.parametrize("stores", ["cached", "memory", "measured"])
def test_collectives_are_right_with_each_way_to_write(stores, monkeypatch):
    monkeypatch.setenv("PYCOLL_PEER_STORES", stores)
    assert run_ranks(reduced, 3) == [[]] * 3


def reduced_in_registered_arrays(comm: pycoll.Communicator) -> list[str]:
    """The steps with a wrong result. Arrays are rewritten in every second step."""
    n, wrong = comm.size, []
    # Blocks of which lines are returned, and more; blocks of which they are claimed; periods.
    for count, shift, steps in ((COUNT, 1, 12), (COUNT // 3, 1, 12), (4099, 0, 2 * PERIOD)):
        x, out, all_x = (comm.empty(count * k + shift, "f32")[shift:] for k in (1, 1, n))
        for step in range(steps):
            if step % 2 == 0:
                x[:] = np.arange(count) % 1009 + step + comm.rank
            expected = (np.arange(count) % 1009 + step - step % 2) * n + n * (n - 1) / 2
            comm.all_reduce(x, out=out, algorithm="two_shot/direct")
            if not np.array_equal(out, expected):
                wrong.append(f"all_reduce {count} {step}")
            comm.all_gather(x, out=all_x, algorithm="all_pairs/direct")
            parts = all_x.reshape(n, count)
            if not np.array_equal(parts[-1] - parts[0], np.full(count, n - 1)):
                wrong.append(f"all_gather {count} {step}")
    return wrong


@pytest.mark.parametrize("loads", ["kept", "returned", "claimed", "measured"])
def test_arrays_are_right_with_lines_that_readers_keep_return_or_claim(loads, monkeypatch):
    monkeypatch.setenv("PYCOLL_PEER_LOADS", loads)
    assert run_ranks(reduced_in_registered_arrays, 3) == [[]] * 3


def reduced_by_messages_of_any_size(comm: pycoll.Communicator) -> list[str]:
    """The calls with a wrong result, of many more messages than slots, small and large in turn."""
    comm.register_after = 0  # registered arrays have no slots
    sizes = np.random.default_rng(0).integers(1, 40_000, 150)  # the same on all ranks
    wrong = []
    for call, count in enumerate(map(int, sizes)):
        name = ("one_shot/simple", "two_shot/simple", "ring/simple", "tree/simple")[call % 4]
        x = (np.arange(count) % 1009 + comm.rank + call).astype(np.float32)
        expected = comm.size * (x - comm.rank) + comm.size * (comm.size - 1) / 2
        if not np.array_equal(comm.all_reduce(x.copy(), algorithm=name), expected):
            wrong.append(f"{name} {count}")
        parts = comm.all_gather(x, algorithm="ring/simple").reshape(comm.size, count)
        if not all(np.array_equal(parts[r], x - comm.rank + r) for r in range(comm.size)):
            wrong.append(f"all_gather {count}")
        block = count // comm.size
        send = [block] * comm.size  # each rank knows its own counts only
        got = comm.all_to_all(x[: sum(send)].copy(), send_counts=send, recv_counts=send)
        mine = x[comm.rank * block :][:block] - comm.rank
        if not np.array_equal(got, np.concatenate([mine + r for r in range(comm.size)])):
            wrong.append(f"all_to_all {count}")
    return wrong


@pytest.mark.parametrize("checks_data", ["0", "1"])
def test_messages_that_take_turns_in_slots_are_right(checks_data, monkeypatch):
    monkeypatch.setenv("PYCOLL_CHECK_DATA", checks_data)  # checksums stand behind the bytes
    assert run_ranks(reduced_by_messages_of_any_size, 2) == [[]] * 2


def gathered_with_late_ranks(comm: pycoll.Communicator) -> list[str]:
    """The calls with a wrong result, of several groups of tiles, to which one rank comes late."""
    comm.register_after = 0  # registered arrays have no slots
    wrong = []
    for call in range(4):
        x = (np.arange(COUNT * 2) % 1009 + comm.rank + call).astype(np.float32)
        if call % 2 == comm.rank:
            time.sleep(0.02)  # the peer has sent all that it may
        parts = comm.all_gather(x, algorithm="ring/simple").reshape(2, COUNT * 2)
        if not all(np.array_equal(parts[r], x - comm.rank + r) for r in range(2)):
            wrong.append(f"all_gather {call}")
        got = comm.all_to_all(x, algorithm="pairwise/simple").reshape(2, COUNT)
        mine = x[comm.rank * COUNT :][:COUNT] - comm.rank
        if not all(np.array_equal(got[r], mine + r) for r in range(2)):
            wrong.append(f"all_to_all {call}")
    return wrong


def test_an_early_rank_writes_no_place_that_its_peer_still_needs():
    """Two ranks trade places, which credits say nothing about (decision 0122)."""
    assert run_ranks(gathered_with_late_ranks, 2) == [[]] * 2


def test_an_all_to_all_leaves_the_slots_at_half_the_size():
    """Its input fills the caches as its output does (decision 0112)."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("where ranks share a core, the choice is another one")

    def choices(comm: pycoll.Communicator) -> list[str]:
        names = ("all_to_all", "all_gather")
        return [comm.explain(name, 4 << 20).splitlines()[0].split(": ")[1] for name in names]

    texts = run_ranks(choices, 2)
    assert texts == [["pairwise/direct over shm", "ring/simple over shm"]] * 2
