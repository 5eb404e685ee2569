"""Plain arrays of small all_reduces run without slots, on a copy that the peers access."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from worlds import Comm, on_ranks

import pycoll

pytestmark = pytest.mark.ranks

COPIED = (4 << 10, (4 << 10) + 4, 20_000, 64 << 10, (256 << 10) - 4)  # bytes of float32
NOT_COPIED = (4, 256 << 10)
# Whatever the number of cores suggests.
DIRECT = {"PYCOLL_ALGO": "all_reduce:auto/direct:4k-256k"}


def last_protocol(comm: Comm) -> str:
    return comm.flight_record()[-1]["algorithm"].split("/")[1]


@on_ranks(processes=[2, 3, 4], env=DIRECT)
def test_all_reduce_of_plain_arrays_runs_directly_on_copies(comm):
    comm.register_after = 0
    n, rank = comm.size, comm.rank
    for nbytes in (*COPIED, *NOT_COPIED):
        count = nbytes // 4
        memory = np.full(count + 3, -1, np.float32)  # what is around the array stays
        x, out = memory[1:-2], np.full(count, -1, np.float32)
        for turn in range(3):
            x[:] = np.arange(count) % 1000 + rank + turn
            before = x.copy()
            expected = n * (np.arange(count, dtype=np.float64) % 1000 + turn) + n * (n - 1) / 2
            comm.all_reduce(x, "sum", out)
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(x, before)
            comm.all_reduce(x)
            np.testing.assert_array_equal(x, expected)
        assert (memory[0], *memory[-2:]) == (-1, -1, -1)
        if nbytes in COPIED:
            assert last_protocol(comm) == "direct", nbytes


@on_ranks(processes=[3], env=DIRECT)
def test_ranks_with_plain_and_mapped_arrays_run_directly(comm):
    comm.register_after = 0
    count = 5000
    plain, mapped, registered = np.empty(count), comm.empty(count, np.float64), np.empty(count)
    comm.register(registered)
    for x, out in [(plain, plain), (mapped, mapped), (plain, mapped), (registered, plain)]:
        x[:] = comm.rank + 1
        a, b = (x, out) if comm.rank == 1 else (mapped, registered)
        a[:] = comm.rank + 1
        comm.all_reduce(a, "sum", b)
        assert (b == 6).all()
        assert a is b or (a == comm.rank + 1).all()
        assert last_protocol(comm) == "direct"


@on_ranks(processes=[2], env={"PYCOLL_ALGO": "all_reduce:one_shot/simple"})
def test_rule_for_slots_copies_no_arrays(comm):
    comm.all_reduce(np.ones(4096, np.float32))
    assert last_protocol(comm) == "simple"


@on_ranks(processes=[2])
def test_calls_that_name_direct_copy_small_plain_arrays(comm):
    for nbytes in (1024, 20_000):
        comm.all_reduce(np.ones(nbytes // 4, np.float32), algorithm="two_shot/direct")
        assert last_protocol(comm) == "direct"


@on_ranks(processes=[2])
def test_small_mapped_arrays_use_slots_where_each_rank_has_a_core(comm):
    for nbytes in (8 << 10, 32 << 10):
        comm.all_reduce(comm.empty(nbytes // 4, np.float32))
        has_cores = len(os.sched_getaffinity(0)) > 1
        expected = "simple" if has_cores and nbytes < 16 << 10 else "direct"
        assert last_protocol(comm) == expected, nbytes


@on_ranks(processes=[2, 3])
def test_explain_says_which_arrays_are_copied(comm):
    text = comm.explain("all_reduce", 32 << 10)
    has_cores = comm.size <= len(os.sched_getaffinity(0))
    if comm.size == 2 and has_cores:  # slots are faster
        assert "copied" not in text and "on copies" not in text
        assert "/simple over shm" in text.splitlines()[0]
        return
    on_copies = " on copies " if has_cores else "arrays that are not mapped are copied to mapped"
    assert on_copies in text and "/direct over shm" in text.splitlines()[0]
    assert on_copies not in comm.explain("all_reduce", 1 << 20)
    assert "are copied" not in comm.explain("broadcast", 16 << 10)


def shared_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem"))


@on_ranks(processes=[2], env=DIRECT)
def test_closed_communicators_leave_no_copies_behind(comm):
    """Each keeps its copy at most until it is closed, and a larger one replaces a smaller one."""
    parts = []
    for turn in range(21):
        part = comm.split(0)
        for nbytes in COPIED:
            part.all_reduce(np.ones(nbytes // 4, np.float32))
        part.close()
        parts.append(part)
        if turn == 0:
            before = shared_kib()
    assert shared_kib() - before < 20 * 256 / 4


def address_of_next(comm: Comm) -> int:
    """The address of an array with the size of the copy: the heap takes the first free place."""
    return comm.empty(16 << 10, np.float32).ctypes.data


@on_ranks(processes=[2], env=DIRECT)
def test_memory_of_the_copy_is_used_again_unless_a_call_failed(comm):
    """A late rank may still write it."""
    place = address_of_next(comm)
    for fails in (False, True):
        part = comm.split(0)
        x = np.ones(16 << 10, np.float32)
        part.all_reduce(x)
        assert address_of_next(comm) != place
        if fails and comm.rank == 0:
            part.timeout_s = 0.05
            with pytest.raises(pycoll.TimeoutError):
                part.all_reduce(x)
            assert (x == 2).all()
        comm.barrier()
        part.close()
        if comm.rank == 0:
            assert (address_of_next(comm) == place) == (not fails)
