"""split and group: the members of the parts, their order, and the resources given back."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from worlds import Comm, on_ranks

from pycoll import CollectiveMismatchError, TimeoutError, UsageError

pytestmark = pytest.mark.ranks


def members(comm: Comm, part: Comm) -> list[int]:
    """World ranks of the part's members, in the part's order."""
    ranks = np.zeros(part.size, np.int64)
    ranks[part.rank] = comm.rank
    part.all_reduce(ranks)
    return ranks.tolist()


@on_ranks(5)
def test_split_groups_by_color_and_orders_by_key(comm):
    even_odd = comm.split(comm.rank % 2)
    assert members(comm, even_odd) == [r for r in range(5) if r % 2 == comm.rank % 2]
    assert even_odd.rank == comm.rank // 2
    backwards = comm.split(7, key=-comm.rank)
    assert members(comm, backwards) == [4, 3, 2, 1, 0]
    ties = comm.split(0, key=1 if comm.rank < 2 else 0)
    assert members(comm, ties) == [2, 3, 4, 0, 1]
    alone = comm.split(comm.rank)
    assert (alone.rank, alone.size) == (0, 1)
    assert members(comm, alone) == [comm.rank]
    assert alone.transport == comm.transport
    comm.barrier()


@on_ranks(4)
def test_split_negative_color_gets_none(comm):
    part = comm.split(0 if comm.rank in (0, 2) else -1)
    assert (part is None) == (comm.rank in (1, 3))
    if part is not None:
        assert members(comm, part) == [0, 2]
    assert comm.split(-1) is None
    comm.barrier()


@on_ranks(4)
def test_split_nests_and_the_parts_work_side_by_side(comm):
    half = comm.split(comm.rank // 2)
    single = half.split(half.rank)
    everyone = comm.split(0)
    for i in range(10):
        x = np.full(1000, comm.rank + i, np.float64)
        half.all_reduce(x)
        comm.all_reduce(x)
        everyone.all_reduce(x, "max")
        single.all_reduce(x)
        assert (x == 2 * (6 + 4 * i)).all()
    half.close()
    everyone.split(0).barrier()  # the part of a part outlives its siblings


@on_ranks(4)
def test_split_error_of_one_part_leaves_the_others_alone(comm):
    part = comm.split(comm.rank // 2)
    if comm.rank < 2:
        with pytest.raises(CollectiveMismatchError):
            part.all_reduce(np.ones(1 + comm.rank))
    else:
        part.all_reduce(np.ones(1))
    comm.barrier()
    comm.split(0).barrier()  # a broken part can be replaced


# Pages of files are not counted: the system drops those that rest, and they come back when used.
KINDS = "Anonymous:", "Pss_Shmem:"


def count_resources(comm: Comm) -> dict[str, int]:
    """Resources of this process, counted by one rank at a time: counting opens files."""
    found: dict[str, int] = {}
    for turn in range(comm.size):
        comm.barrier()
        if turn == comm.rank:
            maps = Path("/proc/self/maps").read_text().splitlines()
            rollup = Path("/proc/self/smaps_rollup").read_text().split()
            found = {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
                "resident KiB": sum(int(rollup[rollup.index(kind) + 1]) for kind in KINDS),
            }
    comm.barrier()
    return found


def use_part(comm: Comm, i: int) -> Comm:
    """Splits, uses the part for everything that takes memory or descriptors, and closes it."""
    with comm.split(comm.rank % (1 + i % 3), key=i) as part:
        x = part.empty(5000, np.float64) if i % 2 else np.empty(5000)
        x[:] = 1
        part.all_reduce(x)
        assert (x == part.size).all()
        if i % 3 == 0:
            part.send(x, part.size - 1 - part.rank, async_op=i % 2 == 0)
            part.recv(x, part.size - 1 - part.rank)
        if i % 5 == 0:
            part.barrier(async_op=True).wait()
    return part


# A rank keeps the free memory of its allocator, which all ranks share when they are threads, and a
# page table for the addresses that it has used.
SLACK_KIB = 2048


@on_ranks(3, own=True)
def test_split_used_and_closed_gives_everything_back(comm):
    for i in range(40):  # everything that is made only once
        use_part(comm, i)
    before = count_resources(comm)
    resident_kib = [before.pop("resident KiB")]
    for i in range(200):
        use_part(comm, i)
        if i % 50 == 49:
            after = count_resources(comm)
            resident_kib.append(after.pop("resident KiB"))
            assert after == before
    # A leak grows in each stretch. A heap that other tests have used may grow at once, and by whole
    # huge pages where the kernel makes them by itself.
    assert min(b - a for a, b in pairwise(resident_kib)) <= SLACK_KIB / 4
    assert max(resident_kib) <= resident_kib[0] + 8 * SLACK_KIB


@on_ranks(3, own=True)
def test_close_gives_memory_and_descriptors_back_while_the_object_exists(comm):
    for i in range(40):
        use_part(comm, i)
    before = count_resources(comm)
    parts = [use_part(comm, i) for i in range(20)]
    comm.barrier()
    after = count_resources(comm)
    for part in parts:
        assert part.closed and part.rank < part.size and "closed" in repr(part)
        for late in (part.flight_record, part.stragglers, part.barrier):
            with pytest.raises(UsageError, match="closed"):
                late()
        with pytest.raises(UsageError, match="closed"):
            part.empty(1, np.uint8)
        part.close()
    # Objects of Python and plans live on, 100 KiB each; slots and mailboxes would be more.
    assert after.pop("resident KiB") <= before.pop("resident KiB") + SLACK_KIB + 20 * 3 * 200
    assert after == before


@on_ranks(3, timeout_s=0.4)
def test_split_member_that_does_not_come_is_a_timeout(comm):
    if comm.rank == 1:
        time.sleep(1.0)
        return
    with pytest.raises(TimeoutError, match="rank 1 has not entered it"):
        comm.split(0)


@on_ranks(2)
def test_split_wants_whole_numbers(comm):
    for wrong in ("red", 1.5, None, 1 << 40, 1 << 63, -(1 << 31) - 1, [1], object()):
        for name, arguments in (("color", (wrong,)), ("key", (0, wrong))):
            expected = f"{name} is .*, expected a whole number from -2147483648"
            with pytest.raises(UsageError, match=expected):
                comm.split(*arguments)
    assert comm.split((1 << 31) - 1, -(1 << 31)).size == comm.size
    comm.barrier()


@on_ranks(processes=[2])
def test_splits_of_splits_may_be_deep(comm):
    """The name of a part gets longer with each split; sockets have names of 107 bytes at most."""
    parts = [comm]
    for depth in range(60):
        parts.append(parts[-1].split(0))
        x = np.ones(3)
        assert parts[-1].all_reduce(x)[0] == 2, depth
        if len(parts) > 3:
            parts.pop(1).close()


# --- group ---


@on_ranks(4)
def test_group_has_the_ranks_in_the_order_of_the_list(comm):
    for ranks in ([2, 0], (1,), range(4), np.array([3, 1, 2])):
        part = comm.group(ranks)
        if comm.rank not in list(ranks):
            assert part is None
            continue
        with part:
            assert part.rank == list(ranks).index(comm.rank)
            assert part.size == len(ranks)
            x = np.array([comm.rank])
            assert part.all_reduce(x)[0] == sum(ranks)
            x[0] = comm.rank
            assert part.broadcast(x, root=len(ranks) - 1)[0] == list(ranks)[-1]


@on_ranks(threads=[2])
def test_group_takes_deterministic_over(comm):
    assert not comm.deterministic
    assert not comm.group([0, 1]).deterministic
    comm.deterministic = True
    assert comm.group([0, 1]).deterministic
    assert comm.split(0).deterministic


@on_ranks(threads=[3])
def test_group_with_other_ranks_on_one_rank_raises_usage_error_there(comm):
    with pytest.raises(UsageError, match="and not on all of them: . of . came"):
        comm.group([0, 1] if comm.rank == 0 else [0, 1, 2])
    comm.barrier()  # which is as usable as before


@on_ranks(processes=(2, 4), own=True)
def test_split_opens_one_descriptor(comm):
    """Parts share the handles on processes with the communicator that they come from."""
    comm.split(0).close()
    before = len(os.listdir("/proc/self/fd"))
    parts = [comm.split(0) for _ in range(20)]
    nested = [parts[0].split(part.rank) for part in parts[:5]]
    assert len(os.listdir("/proc/self/fd")) - before == len(parts) + len(nested)
    for part in (*nested, *parts):
        part.close()
    assert len(os.listdir("/proc/self/fd")) == before
    comm.barrier()
