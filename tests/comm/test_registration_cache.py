"""The registration cache: NumPy arrays that are used repeatedly move to shared memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
from worlds import Comm, on_ranks

from pycoll import UsageError, run_ranks

pytestmark = pytest.mark.ranks

COUNT = 1 << 18  # of float32: 1 MiB
USES = 8
processes = on_ranks(processes=[2])
own_processes = on_ranks(processes=[2], own=True)


def is_shared(x: np.ndarray) -> bool:
    """Whether the middle of the array lies in memory that other processes map, too."""
    address = x.ctypes.data + x.nbytes // 2
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1].endswith("s")
    raise AssertionError("not mapped")


def pass_often(comm: Comm, x: np.ndarray, times: int = USES) -> None:
    """Leaves the values as they are, where they are identical on all ranks."""
    for _ in range(times):
        comm.all_reduce(x, "max")


@processes
def test_array_moves_once_and_keeps_address_and_values(comm):
    assert comm.register_after == USES
    for offset in (0, 3):
        whole = np.arange(COUNT + 8, dtype=np.float32)
        before = whole.copy()
        x = whole[offset : offset + COUNT]
        address = x.ctypes.data
        pass_often(comm, x, USES - 1)
        assert not is_shared(x)
        pass_often(comm, x, 1)
        assert is_shared(x) and x.ctypes.data == address
        assert comm.flight_record()[-1]["algorithm"].endswith("/direct")
        np.testing.assert_array_equal(whole, before)
        for _ in range(3):
            x += comm.rank
            comm.all_reduce(x)
            before[offset : offset + COUNT] = 2 * before[offset : offset + COUNT] + 1
            np.testing.assert_array_equal(whole, before)


def shared_kib() -> int:
    """Shared memory of this process, its part of pages that others have, too."""
    (line,) = re.findall(r"Pss_Shmem: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(line)


@own_processes
def test_dead_array_leaves_ordinary_memory_and_nothing_behind(comm):
    deaths: list[int] = []
    before = 0
    for turn in range(20):
        if turn == 2:
            before = shared_kib()  # with the slots, which stay
        x = np.full(COUNT, comm.rank, np.float32)
        weakref.finalize(x, deaths.append, turn)
        pass_often(comm, x, 2 * USES + 1)
        assert is_shared(x)
        del x
        y = np.ones(COUNT, np.float32)  # most likely where the other was
        assert not is_shared(y) and y.sum() == COUNT
    assert len(deaths) == 20
    grown = shared_kib() - before
    assert grown < 2 * 1024, f"{grown} KiB of 18 MiB are still there"


@own_processes
def test_arrays_that_are_passed_once_each_hardly_ever_move(comm):
    num_moved = 0
    for _ in range(100):
        x = np.ones(COUNT, np.float32)  # most likely where the last one was
        comm.all_reduce(x)
        num_moved += is_shared(x)
        assert (x == 2).all()
        del x
    assert num_moved <= 4  # after 8, 16, 32 and 64


@on_ranks(processes=[3])
def test_out_and_x_of_a_collective_move_and_new_results_do_not(comm):
    x = np.full(COUNT, comm.rank, np.float32)
    out = np.empty(comm.size * COUNT, np.float32)
    results = []
    for _ in range(2 * USES):
        comm.all_gather(x, out=out)
        assert out[::COUNT].tolist() == list(range(comm.size))
        results.append(comm.all_gather(x))
        assert results[-1][COUNT] == 1
    assert is_shared(x) and is_shared(out)
    assert not any(is_shared(each) for each in results)


@processes
def test_arrays_move_wherever_they_lie_beside_each_other(comm):
    for apart in (1, 2, 3, 7, 16, 39):  # bytes between x and out, in 16
        memory = np.zeros(2 * 4 * COUNT + 16 * apart, np.uint8)
        x = memory[: 4 * COUNT].view(np.float32)
        out = memory[4 * COUNT + 16 * apart :].view(np.float32)
        for _ in range(2 * USES + 1):
            comm.all_reduce(x, out=out)
        assert is_shared(x) and is_shared(out), apart


@processes
def test_small_block_of_a_large_message_moves(comm):
    x = np.full(8192, comm.rank, np.float32)
    out = np.empty(2 * 8192, np.float32)
    for _ in range(USES):
        comm.all_gather(x, out=out)
    assert is_shared(x) and is_shared(out)
    assert comm.flight_record()[-1]["algorithm"].endswith("/direct")


@processes
def test_blocks_move_also_on_ranks_without_the_large_array(comm):
    """Only the root of a gather or scatter has an array of the whole message, of 64 KiB here."""
    block = np.full(8192, comm.rank, np.float32)
    whole = np.arange(2 * 8192, dtype=np.float32) if comm.rank == 0 else None
    for _ in range(USES + 1):
        comm.scatter(whole, 0, block)
        assert block[0] == comm.rank * 8192
        comm.gather(block, 0, whole)
    assert is_shared(block) and (whole is None or is_shared(whole))
    assert {r["algorithm"].split("/")[1] for r in comm.flight_record()[-2:]} == {"direct"}
    assert whole is None or (whole == np.arange(2 * 8192)).all()


@processes
def test_operations_that_are_queued_meanwhile_lose_nothing(comm):
    x = np.ones(COUNT)
    works = [comm.all_reduce(x, async_op=True) for _ in range(2 * USES)]
    for each in works:
        each.wait()
    assert is_shared(x)
    np.testing.assert_array_equal(x, 2.0 ** (2 * USES))
    with comm.coalesce():
        comm.all_reduce(x)
    np.testing.assert_array_equal(x, 2.0 ** (2 * USES + 1))


@own_processes
def test_forked_process_has_its_own_copy(comm):
    x = np.full(COUNT, 7.0)
    pass_often(comm, x)
    assert is_shared(x)
    to_child, from_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(to_child, 1)
        ok = not is_shared(x) and bool((x == 7).all())
        x.fill(3)
        del x
        os._exit(0 if ok else 1)
    x.fill(5)
    os.write(from_parent, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert bool((x == 5).all()) and is_shared(x)
    pass_often(comm, x)
    assert bool((x == 5).all())


@processes
def test_array_that_moved_is_resized_as_before_and_moves_again(comm):
    for count in (COUNT + 1, 20 * COUNT, COUNT // 2, 100, 0):
        x = np.arange(COUNT, dtype=np.float32)
        pass_often(comm, x, 2 * USES)
        assert is_shared(x)
        x.resize(count, refcheck=False)
        kept = min(count, COUNT)
        np.testing.assert_array_equal(x[:kept], np.arange(kept, dtype=np.float32))
        assert not x[kept:].any()
        if count < COUNT // 2:
            continue
        assert not is_shared(x)
        pass_often(comm, x, 2 * USES)
        assert is_shared(x)
        x[:] = comm.rank
        comm.all_reduce(x)
        assert (x == 1).all()


@processes
def test_array_of_a_pending_operation_refuses_to_be_resized(comm):
    for start in ("all_reduce", "recv", "coalesce"):
        x = np.full(COUNT, comm.rank, np.float32)
        if start == "coalesce":
            with comm.coalesce():
                comm.all_reduce(x)
                with pytest.raises(ValueError, match="cannot resize"):
                    x.resize(2 * COUNT, refcheck=False)
            assert (x == 1).all()
        elif start == "all_reduce":
            comm.barrier()
            work = comm.all_reduce(x, async_op=True) if comm.rank == 0 else None
            if work is not None:
                with pytest.raises(ValueError, match="cannot resize"):
                    x.resize(2 * COUNT, refcheck=False)
            comm.send(np.zeros(1), 1) if comm.rank == 0 else comm.recv(np.zeros(1), 0)
            if comm.rank == 1:
                comm.all_reduce(x)
            else:
                work.wait()
            assert (x == 1).all()
        else:
            work = comm.recv(x, 1 - comm.rank, async_op=True)
            with pytest.raises(ValueError, match="cannot resize"):
                x.resize(2 * COUNT, refcheck=False)
            comm.send(np.ones(COUNT, np.float32), 1 - comm.rank)
            work.wait()
            assert (x == 1).all()
            del work
        x.resize(8, refcheck=False)


@processes
def test_memory_that_is_not_numpys_stays_where_it_is(comm, tmp_path):
    of_mmap = np.frombuffer(mmap.mmap(-1, 4 * COUNT), np.float32)
    of_file = np.memmap(tmp_path / str(comm.rank), np.float32, "w+", shape=COUNT)
    of_bytes = np.frombuffer(bytearray(4 * COUNT), np.float32)
    small = np.zeros(4000, np.float32)
    for _ in range(2 * USES):
        for each in (of_mmap, of_file, of_bytes, small):
            comm.all_reduce(each)
    assert weakref.getweakrefcount(of_bytes) == 0
    assert not is_shared(of_bytes) and not is_shared(small)


def memory_of_groups(pid: int | str) -> set[int]:
    """Memory of groups of ranks to which a process has descriptors, by inode."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if "memfd:pycoll " in str(link.readlink()):
                inodes.add(link.stat().st_ino)
    return inodes


@own_processes
def test_array_may_outlive_its_communicator_and_keeps_no_descriptor(comm):
    part = comm.split(0)
    x = np.full(COUNT, 2.0)
    pass_often(part, x)
    assert is_shared(x)
    part.close()
    pass_often(comm, x)
    comm.close()
    gc.collect()
    # The parent, which runs the tests, may have inherited its own to this rank.
    assert memory_of_groups("self") <= memory_of_groups(os.getppid())
    assert is_shared(x) and (x == 2).all()
    x += 1
    assert x.sum() == 3 * COUNT


def never(comm: Comm) -> None:
    assert comm.register_after == 0
    x, y = np.zeros(COUNT), np.zeros(COUNT)
    pass_often(comm, x, 20)
    assert not is_shared(x)
    comm.register_after = 2
    part = comm.split(0)
    assert part.register_after == 2
    pass_often(part, y, 2)
    assert is_shared(y)
    with pytest.raises(UsageError, match="register_after is -1, expected a number of uses"):
        comm.register_after = -1


def test_attribute_and_environment_decide(monkeypatch):
    monkeypatch.setenv("PYCOLL_REGISTER_AFTER", "0")
    run_ranks(never, 2)
    monkeypatch.setenv("PYCOLL_REGISTER_AFTER", "often")
    with pytest.raises(UsageError, match="PYCOLL_REGISTER_AFTER=often: expected a number from 0"):
        run_ranks(never, 2)


@on_ranks(threads=[2])
def test_arrays_of_threads_stay(comm):
    assert comm.register_after == 0
    comm.register_after = 3  # no harm
    x = np.zeros(COUNT)
    pass_often(comm, x)
    assert not is_shared(x)
