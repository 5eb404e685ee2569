"""Arrays of the caller that peers reach directly: Communicator.register."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import Comm, on_ranks

from pycoll import UsageError, run_ranks

pytestmark = pytest.mark.ranks

PAGE = mmap.PAGESIZE


def array_at(offset: int, count: int, dtype: Any = np.float32) -> np.ndarray:
    """An array that starts `offset` bytes after a page does, in memory of its own."""
    nbytes = count * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 3 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE + offset
    return memory[start : start + nbytes].view(dtype)


def shared_pages(x: np.ndarray) -> int:
    """Bytes of `x` that lie in pages shared with other processes."""
    begin, end, total = x.ctypes.data, x.ctypes.data + x.nbytes, 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights = line.split()[:2]
        low, high = (int(text, 16) for text in area.split("-"))
        if rights.endswith("s"):
            total += max(0, min(end, high) - max(begin, low))
    return total


@on_ranks(processes=[2])
def test_all_reduce_registered_at_any_offset_is_direct_and_right(comm):
    counts = [4 * PAGE // 4, 4 * PAGE // 4 + 7, 30_000, 100_001]
    for offset, count in itertools.product([0, 16, 100, PAGE - 4], counts):
        x = comm.register(array_at(offset, count))
        out = comm.register(array_at(offset + 4 * comm.rank, count))
        for step in range(2):  # each with other values on the pages' edges
            x[:] = np.arange(count) % 97 + step + comm.rank
            expected = sum(np.arange(count) % 97 + step + rank for rank in range(comm.size))
            comm.all_reduce(x, out=out)
            np.testing.assert_array_equal(out, expected)
            comm.all_reduce(x)
            np.testing.assert_array_equal(x, expected)
        if x.nbytes >= 64 << 10:  # smaller ones use slots where the cores share no cache
            assert all(r["algorithm"].endswith("/direct") for r in comm.flight_record()[-4:])


@on_ranks(processes=[3])
def test_collective_registered_on_three_ranks_matches_plain(comm):
    n, count = comm.size, 12_345
    outs = {"all_gather": count * n, "reduce_scatter": count, "all_to_all": count * n}
    for collective in [*outs, "broadcast"]:
        big = collective in ("reduce_scatter", "all_to_all")
        x = array_at(12, count * (n if big else 1))
        x[:] = np.random.default_rng(comm.rank).integers(0, 50, x.size)
        plain = x.copy()
        comm.register(x)
        if collective == "broadcast":
            comm.broadcast(plain, root=1)
            comm.broadcast(x, root=1)
            np.testing.assert_array_equal(x, plain)
            continue
        out = comm.register(array_at(500, outs[collective]))
        expected = np.zeros_like(out)
        getattr(comm, collective)(plain, out=expected)
        getattr(comm, collective)(x, out=out)
        np.testing.assert_array_equal(out, expected)
        assert comm.flight_record()[-1]["algorithm"].endswith("/direct")


@on_ranks(processes=[2])
def test_views_of_registered_array_count_as_registered(comm):
    x = comm.register(array_at(8, 200_000))
    x[:] = 0
    part = x[50_001:150_002]
    part[:] = comm.rank + 1
    comm.all_reduce(part)
    assert (part == 3).all() and x[50_000] == 0 and x[150_002] == 0
    assert comm.flight_record()[-1]["algorithm"].endswith("/direct")


@on_ranks(processes=[2])
def test_bytes_around_registered_array_stay(comm):
    whole = np.full(100_000, 7, np.uint8)
    x = comm.register(whole[1000:60_000])
    x[:] = 1
    whole[:1000] = 8  # while it is registered
    comm.all_reduce(x)
    comm.unregister(x)
    assert (whole[:1000] == 8).all() and (whole[60_000:] == 7).all() and (x == 2).all()


@on_ranks(processes=[2])
def test_unregister_moves_the_array_back_with_its_values(comm):
    x = array_at(16, 100_000)
    address = x.ctypes.data
    x[:] = np.arange(x.size)
    assert shared_pages(x) == 0
    comm.register(x)
    comm.register(x[10:20])  # counted: it lies within
    assert shared_pages(x) > x.nbytes - 2 * PAGE
    comm.unregister(x[10:20])
    assert shared_pages(x) > 0
    comm.unregister(x)
    assert shared_pages(x) == 0 and x.ctypes.data == address
    np.testing.assert_array_equal(x, np.arange(x.size))
    comm.all_reduce(x)  # through slots now
    np.testing.assert_array_equal(x, np.arange(x.size) * 2)


@on_ranks(processes=[2])
def test_close_unregisters_and_lets_the_array_go(comm):
    class Array(np.ndarray):  # can be referred to weakly
        pass

    x = array_at(0, 50_000).view(Array)
    gone = weakref.ref(x)
    comm.register(x)
    view = x.view(np.ndarray)[:]
    del x
    gc.collect()
    assert shared_pages(view) > 0
    comm.close()
    assert shared_pages(view) == 0
    del view
    gc.collect()
    assert gone() is None


@on_ranks(processes=[2])
def test_registered_with_world_serves_a_part_of_it(comm):
    x = comm.register(array_at(0, 50_000))
    x[:] = 1
    part = comm.split(0, key=-comm.rank)
    part.all_reduce(x)
    assert part.flight_record()[-1]["algorithm"].endswith("/direct")
    assert (x == 2).all()


@on_ranks(processes=[2])
def test_unregister_waits_for_what_is_queued(comm):
    x = comm.register(array_at(4, 500_000))
    x[:] = 1
    works = [comm.all_reduce(x, async_op=True) for _ in range(5)]
    comm.unregister(x)
    assert all(w.done() for w in works)
    assert (x == 2**5).all()


@pytest.mark.torch
@on_ranks(2, needs="torch")
def test_register_takes_torch_tensors_and_memory_of_the_communicator(comm):
    import torch

    x = comm.register(torch.full((100_000,), float(comm.rank)))
    assert isinstance(x, torch.Tensor)
    comm.all_reduce(x)
    assert bool((x == 1).all())
    comm.unregister(x)
    from_heap = comm.empty(100, "f32")
    assert comm.register(from_heap) is from_heap
    comm.unregister(from_heap)


def large_bytes() -> int:
    """Bytes of shared memory that this process has mapped as large pages."""
    found = re.findall(r"^ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M)
    return sum(map(int, found)) * 1024


def register_large(comm: Comm) -> int:
    x = np.ones(8 << 20, np.float32)
    y = comm.empty(8 << 20, "f32")
    comm.register(x)
    comm.all_reduce(x, out=y)
    x[::1024] = 1  # touched by its owner, too
    assert (y == comm.size).all()
    return large_bytes() - 2 * x.nbytes


def test_large_arrays_lie_in_large_pages():
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1):
        pytest.skip("Linux before 6.1 cannot make large pages of shared memory")
    if not switch.exists() or "[deny]" in switch.read_text():
        pytest.skip("this system allows no large pages of shared memory")
    assert run_ranks(register_large, 2)[0] > -(8 << 20)


@on_ranks(2)
def test_register_what_is_no_writable_array_raises(comm):
    x = np.zeros(10_000)
    x.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        comm.register(x)
    with pytest.raises(UsageError, match="contiguous"):
        comm.register(np.zeros((100, 100))[:, ::2])


@on_ranks(processes=[2])
def test_register_memory_that_cannot_move_raises_and_leaves_it(comm, tmp_path):
    path = tmp_path / f"file{comm.rank}"
    path.write_bytes(b"\1" * 10 * PAGE)
    mapped = np.memmap(path, np.uint8, "r+")
    with pytest.raises(UsageError, match="file"):
        comm.register(mapped)
    assert (mapped == 1).all()
    shared = np.frombuffer(mmap.mmap(-1, 10 * PAGE), np.uint8)
    with pytest.raises(UsageError, match="cannot be registered"):
        comm.register(shared)
    x = array_at(0, 10_000)
    comm.register(x[:5000])
    with pytest.raises(UsageError, match="overlaps"):
        comm.register(x[2500:7500])
    with pytest.raises(UsageError, match="overlaps"):
        comm.register(x)
    with pytest.raises(UsageError, match="not registered"):
        comm.unregister(x[7000:])
    comm.all_reduce(x)


@on_ranks(processes=[2])
def test_register_hundreds_of_times_leaves_nothing(comm):
    def maps() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    x = array_at(40, 60_000)
    references = sys.getrefcount(x)
    for step in range(300):
        comm.register(x)
        comm.unregister(x)
        if step == 10:
            before = maps()
    assert maps() <= before + 2
    assert sys.getrefcount(x) == references


@on_ranks(processes=[2])
def test_broadcast_that_both_ends_move_is_right(comm):
    """The root gives one half while the other rank takes the other; larger than any stage."""
    for registered in (False, True):
        for root in range(comm.size):
            x = np.full(1 << 20, comm.rank, np.float32) + np.arange(1 << 20) % 5
            if registered:
                comm.register(x)
            comm.broadcast(x, root, algorithm="scatter_all_gather/direct")
            np.testing.assert_array_equal(x, root + np.arange(1 << 20) % 5)
    chosen = comm.explain("broadcast", 16 << 20, mapped=True).splitlines()[0]
    assert "scatter_all_gather/direct" in chosen


@on_ranks(processes=[4])
def test_broadcasts_of_ranks_that_share_cores_are_right(comm):
    """With 2 cores, 8 MiB are written past the caches, and 16 MiB go through slots. The arrays
    begin within a line."""
    values = np.resize(np.arange(1009, dtype=np.float32), 4 << 20)
    for count in (2 << 20, 4 << 20):
        x = comm.empty(count + 3, np.float32)[3:]
        x[:] = comm.rank
        if comm.rank == 3:
            x[:] = values[:count]
        comm.broadcast(x, 3)
        assert np.array_equal(x, values[:count])
