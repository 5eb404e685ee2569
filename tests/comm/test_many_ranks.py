"""Worlds of more ranks than one rank's program has peers."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from collective_oracles import ORACLES, arguments
from comm_cases import inputs

import pycoll
from pycoll import PeerDiedError, UsageError, run_ranks
from pycoll.launch.local_ranks import local_communicators

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

MANY = 96
ENOUGH = 72  # what all ranks prove grows with the cube


@pytest.mark.parametrize("n", [0, 257])
def test_number_of_ranks_that_cannot_be_is_refused(n):
    with pytest.raises(UsageError, match=f"1 to 256 ranks, asked for {n}"):
        local_communicators(n)


@pytest.mark.slow
def test_every_collective_of_72_ranks_equals_numpy():
    def work(comm: pycoll.Communicator) -> None:
        comm.barrier()
        for name, oracle in ORACLES.items():
            shape = oracle.leading(comm.size, 3)
            values = inputs(comm.size, int(np.prod(shape)), np.int64).reshape(comm.size, *shape)
            x = values[comm.rank].copy()
            result = getattr(comm, name)(x, **arguments(name, ENOUGH // 2))
            expected = oracle.expected(values, comm.rank, ENOUGH // 2, "sum")
            if expected is not None:
                assert (result == expected).all(), name

    run_ranks(work, ENOUGH, threads=True, timeout_s=200)


@pytest.mark.slow
def test_algorithm_with_too_many_peers_is_refused_in_words():
    def work(comm: pycoll.Communicator) -> str:
        with pytest.raises(UsageError) as refused:
            comm.all_reduce(np.ones(10), algorithm="one_shot")
        return str(refused.value)

    for text in run_ranks(work, MANY, threads=True):
        assert "would have 95 peers; at most 64 are possible" in text


@pytest.mark.slow
def test_death_of_one_of_96_processes_is_seen_by_all():
    def work(comm: pycoll.Communicator) -> int:
        x = comm.all_reduce(np.full(5, comm.rank), algorithm="tree")
        assert (x == MANY * (MANY - 1) // 2).all()
        if comm.rank == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError) as died:
            comm.all_reduce(x, algorithm="tree")
        return int(died.value.rank)

    outcomes = run_ranks(work, MANY, timeout_s=100, return_errors=True)
    assert [outcome for rank, outcome in enumerate(outcomes) if rank != 77] == [77] * (MANY - 1)
