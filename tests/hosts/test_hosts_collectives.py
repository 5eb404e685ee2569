"""Ranks on two and four hosts: every result equals NumPy, as on one host."""

from __future__ import annotations

import random

import numpy as np
import pytest
from comm_cases import builtin_algorithms, crc
from host_jobs import (
    asynchronous_and_coalesced,
    every_algorithm,
    every_collective,
    fork,
    hierarchical_sizes,
    messages,
    one_case,
    split_and_group,
)
from namespaces import values

import pycoll
from pycoll import UsageError
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import roots_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator


def refused(comm: Comm, algorithm: str) -> str:
    text = "no error"
    try:
        comm.all_reduce(np.ones(1000), algorithm=algorithm)
    except UsageError as error:
        text = str(error)
    comm.all_reduce(np.ones(1000))
    return text


def refusals(comm: Comm) -> tuple[str, str]:
    return refused(comm, "ring/direct"), refused(comm, "hierarchical")


def test_two_hosts_of_one_rank_run_every_algorithm(two):
    places, texts, statuses = two.run_jobs([every_algorithm, refusals, fork])
    assert places == (("tcp", 0),) * 2
    for direct, hierarchical in texts:
        assert "direct needs all ranks on one host" in direct
        assert "on several hosts, each with the same number" in hierarchical
    assert statuses == (0, 0)  # a forked child keeps no link and prints nothing


def test_two_hosts_of_two_ranks_run_every_kind_of_operation(two):
    jobs = [every_algorithm, hierarchical_sizes, split_and_group, messages]
    places, _, kinds, _, _ = two.run_jobs([*jobs, asynchronous_and_coalesced], 2)
    assert places == (("tcp", 0), ("tcp", 1)) * 2
    assert kinds == (["shm", "tcp", "tcp"],) * 4


@pytest.mark.slow
def test_every_kind_of_operation_is_right_with_checksums(two):
    """Seconds: checksums of all bytes of many operations."""
    jobs = [every_collective, split_and_group, messages, asynchronous_and_coalesced]
    two.run_jobs(jobs, 2, PYCOLL_CHECK_DATA="1")


def test_four_hosts_run_what_pycoll_chooses(four):
    four.run_jobs([every_collective])


def changing_broadcasts(comm: Comm) -> list[list[float]]:
    """Rank 0 changes its array at once, although the link has taken only a part of it."""
    x, seen = np.empty(1 << 18, np.float32), []
    for number in range(4):
        x[:] = number
        comm.broadcast(x, 0)
        seen.append(np.unique(x).tolist())
        x[:] = -1
    return seen


def test_array_may_change_while_its_link_still_sends_it(two):
    two.set_send_buffers(32 << 10)
    try:
        assert two.run_jobs([changing_broadcasts]) == [([[0], [1], [2], [3]],) * 2]
    finally:
        two.set_send_buffers(4 << 20)


def test_hosts_may_have_different_numbers_of_ranks_in_any_order(two):
    """Ranks 0 and 2 on one host, 1, 3 and 4 on the other."""

    def main() -> tuple[int, int]:
        with pycoll.init(timeout_s=20) as comm:
            for rows in (1, 1000, 100_000):
                one_case(comm, "all_reduce", rows, 0, None)
                one_case(comm, "all_to_all", rows, 0, None)
            return comm.host_rank, crc(comm.all_gather(np.array([comm.rank])))

    results = values(two.outcomes(two.start_world(main, [0, 1, 0, 1, 1])))
    assert [host_rank for host_rank, _ in results] == [0, 0, 1, 1, 2]
    assert len({gathered for _, gathered in results}) == 1


@pytest.mark.soak
def test_random_operations_on_four_hosts_equal_numpy(four):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")

    def job(comm: Comm) -> None:
        choose = random.Random(seed)
        for _ in range(300):
            name = choose.choice(sorted(ORACLES))
            rows = choose.choice([0, 1, 7, 100, 5000, 60_000])
            algorithm = choose.choice([*builtin_algorithms(name), None])
            one_case(comm, name, rows, choose.choice(roots_of(name, comm.size)), algorithm)

    four.run_jobs([job], 2, timeout_s="60")
