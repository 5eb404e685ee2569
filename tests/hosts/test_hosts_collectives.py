"""Ranks on two and four hosts: whatever they do equals NumPy, as on one host."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from collective_oracles import ORACLES, roots_of
from comm_cases import builtin_algorithms, crc
from host_jobs import (
    asynchronous_and_coalesced,
    every_algorithm,
    every_collective,
    fork,
    messages,
    one_case,
    split_and_group,
)

import pycoll
from pycoll import UsageError

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator


@pytest.mark.parametrize("per_host", [1, 2])
def test_every_collective_algorithm_protocol_and_size_equals_numpy(two, per_host):
    outcomes = two.run(every_algorithm, per_host)
    assert [o.get() for o in outcomes] == [("tcp", i) for i in range(per_host)] * 2
    assert all(o.fds_leaked <= 1 for o in outcomes)  # NumPy opens one


@pytest.mark.slow
def test_every_collective_on_four_hosts_of_one_rank_equals_numpy(four):
    for outcome in four.run(every_algorithm, 1, timeout_s="60"):
        outcome.get()


def test_four_hosts_run_what_pycoll_chooses(four):
    for outcome in four.run(every_collective, 1):
        outcome.get()


def test_hosts_may_have_different_numbers_of_ranks_in_any_order(two):
    """Ranks 0 and 2 on one host, 1, 3 and 4 on the other."""

    def job(comm: Comm) -> tuple[int, int]:
        for rows in (1, 1000, 100_000):
            one_case(comm, "all_reduce", rows, 0, None)
            one_case(comm, "all_to_all", rows, 0, None)
        return comm.host_rank, crc(comm.all_gather(np.array([comm.rank])))

    pids = []
    hosts = [0, 1, 0, 1, 1]

    def main() -> Any:
        with pycoll.init(timeout_s=20) as comm:
            return job(comm)

    port = "20999"
    for rank, host in enumerate(hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": "5", "MASTER_ADDR": two.address(0)}
        pids.append(two.start(host, main, MASTER_PORT=port, PYCOLL_TOKEN="t", **env))
    results = [two.outcome(pid).get() for pid in pids]
    assert [host_rank for host_rank, _ in results] == [0, 0, 1, 1, 2]
    assert len({gathered for _, gathered in results}) == 1


def test_split_and_group_within_and_between_hosts(two):
    for outcome in two.run(split_and_group, 2):
        assert outcome.get() == ["shm", "tcp", "tcp"]


def test_messages_of_every_size_arrive_in_order_between_hosts(two):
    for outcome in two.run(messages, 2):
        outcome.get()


def test_asynchronous_and_coalesced_operations_between_hosts(two):
    for outcome in two.run(asynchronous_and_coalesced, 2):
        outcome.get()


def test_direct_between_hosts_is_refused_in_words(two):
    def job(comm: Comm) -> str:
        with pytest.raises(UsageError) as refused:
            comm.all_reduce(np.ones(1000), algorithm="ring/direct")
        comm.all_reduce(np.ones(1000))
        return str(refused.value)

    for outcome in two.run(job):
        assert "direct needs all ranks on one host" in outcome.get()


def test_forked_child_keeps_no_link_and_says_nothing(two):
    for outcome in two.run(fork):
        assert outcome.get() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_operations_on_four_hosts_equal_numpy(four):
    seed = random.randrange(1 << 30)

    def job(comm: Comm) -> None:
        choose = random.Random(seed)
        for _ in range(300):
            name = choose.choice(sorted(ORACLES))
            rows = choose.choice([0, 1, 7, 100, 5000, 60_000])
            algorithm = choose.choice([*builtin_algorithms(name), None])
            root = choose.choice(roots_of(name, comm.size))
            one_case(comm, name, rows, root, algorithm)

    for outcome in four.run(job, 2, timeout_s="60"):
        assert not outcome.error, f"seed {seed}: {outcome.text}"
