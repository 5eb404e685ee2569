"""Memory of a communicator: in no file system, and no larger than what is used."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from processes import pycoll_files

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks


def memfd_mappings() -> list[tuple[str, int, int]]:
    """Name, size and resident bytes of this process's mappings of shared communicator memory."""
    found = []
    entry: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            entry = line.split(maxsplit=5)
        elif line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("Rss:") and entry[1].endswith("s"):
            found.append((entry[5] if len(entry) > 5 else "", size, int(line.split()[1]) << 10))
    return [row for row in found if row[0].startswith("/memfd:")]


def open_memfds() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [target for target in targets if "memfd" in target]


def test_memory_is_in_no_file_system():
    before = pycoll_files()

    def work(comm: pycoll.Communicator) -> None:
        comm.all_reduce(np.ones(100_000))
        assert not pycoll_files() - before
        comm.barrier()
        # The memory has no name in any file system; `pycoll doctor` finds it here.
        assert open_memfds() and all(name.startswith("/memfd:pycoll") for name in open_memfds())
        assert comm.transport == transport

    for transport in ("shm", "local"):
        run_ranks(work, 3, threads=transport == "local")


def test_memory_of_processes_is_two_memfd_mappings():
    """The segment, and the areas of comm.empty: identical on all ranks."""
    inherited = len(memfd_mappings())  # a test before this one may have kept some for its report

    def work(comm: pycoll.Communicator) -> list[tuple[str, int, int]]:
        comm.all_reduce(np.ones(1000))
        return memfd_mappings()

    mappings = run_ranks(work, 3)
    assert [len(of_rank) - inherited for of_rank in mappings] == [2, 2, 2]
    assert all(name.startswith("/memfd:pycoll") for name, _, _ in mappings[0])
    sizes = [sorted(size for _, size, _ in of_rank) for of_rank in mappings]
    assert sizes == [sizes[0]] * 3


def test_memory_that_no_message_needs_is_not_backed():
    def work(comm: pycoll.Communicator) -> None:
        for _ in range(100):
            comm.all_reduce(np.ones(1, np.float32), algorithm="ring/ll")
        comm.barrier()
        _, sizes, resident = zip(*memfd_mappings(), strict=True)
        assert sum(resident) < min(sum(sizes) / 8, 8 << 20)

    run_ranks(work, 8)


@pytest.mark.slow
def test_worlds_on_both_sides_of_the_smaller_slots_work():
    def work(comm: pycoll.Communicator) -> None:
        n = comm.size
        for algorithm in ("ring/ll", "ring/simple", "one_shot/ll", "halving_doubling/simple", None):
            for count in (1, n + 1, 30_011):
                x = np.full(count, comm.rank)
                comm.all_reduce(x, algorithm=algorithm if n < 64 else "ring")
                assert (x == n * (n - 1) // 2).all()

    run_ranks(work, 17)
    for n in (16, 17, 64):
        run_ranks(work, n, threads=True)


def test_forked_process_that_drops_an_array_does_not_free_it():
    def work(comm: pycoll.Communicator) -> float:
        x = comm.empty(1000, np.float32)
        x[:] = 5
        child = os.fork()
        if child == 0:
            del x
            os._exit(0)
        os.waitpid(child, 0)
        return float(x[0])

    assert run_ranks(work, 2) == [5.0, 5.0]
