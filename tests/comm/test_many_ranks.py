"""Worlds of more ranks than one rank's program has peers."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from collective_oracles import ORACLES, arguments
from comm_cases import inputs
from worlds import Comm, on_ranks

from pycoll import PeerDiedError, UsageError, run_ranks
from pycoll.local_ranks import local_communicators

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

MANY = 96
ENOUGH = 72  # the work of proving grows with the cube


def test_number_of_ranks_that_is_impossible_is_refused():
    for n in (0, 257):
        with pytest.raises(UsageError, match=f"1 to 256 ranks, asked for {n}"):
            local_communicators(n)


@pytest.mark.slow
@on_ranks(threads=[ENOUGH], timeout_s=200)
def test_every_collective_of_72_ranks_equals_numpy(comm):
    comm.barrier()
    for name, oracle in ORACLES.items():
        shape = oracle.leading(comm.size, 3)
        values = inputs(comm.size, int(np.prod(shape)), np.int64).reshape(comm.size, *shape)
        x = values[comm.rank].copy()
        result = getattr(comm, name)(x, **arguments(name, ENOUGH // 2))
        expected = oracle.expected(values, comm.rank, ENOUGH // 2, "sum")
        if expected is not None:
            assert (result == expected).all(), name


@pytest.mark.slow
@on_ranks(threads=[MANY], own=True)
def test_algorithm_with_too_many_peers_is_refused_in_words(comm):
    with pytest.raises(UsageError, match="would have 95 peers; at most 64 are possible"):
        comm.all_reduce(np.ones(10), algorithm="one_shot")


@pytest.mark.slow
def test_death_of_one_of_96_processes_is_seen_by_all():
    def work(comm: Comm) -> int:
        x = comm.all_reduce(np.full(5, comm.rank), algorithm="tree")
        assert (x == MANY * (MANY - 1) // 2).all()
        if comm.rank == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError) as died:
            comm.all_reduce(x, algorithm="tree")
        return int(died.value.rank)

    outcomes = run_ranks(work, MANY, timeout_s=100, return_errors=True)
    assert [outcome for rank, outcome in enumerate(outcomes) if rank != 77] == [77] * (MANY - 1)
