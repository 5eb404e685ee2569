"""Schedules made for hosts: results, the bytes that leave a host, and when they are chosen."""

from __future__ import annotations

import numpy as np
import pytest
from test_hosts_collectives import one_case
from tuning_tables import CORES, size

import pycoll
from pycoll import UsageError, tuning

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator
HIERARCHICAL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_hierarchical_schedule_equals_numpy(two, name):
    def job(comm: Comm) -> None:
        for protocol in ("simple", "ll"):
            for rows in (0, 1, 3, 4099, 300_000):
                for root in range(comm.size) if name == "broadcast" and rows == 4099 else (0,):
                    one_case(comm, name, rows, root, f"hierarchical/{protocol}")

    for outcome in two.run(job, 2):
        outcome.get()


@pytest.mark.slow
def test_hierarchical_schedules_on_four_hosts_equal_numpy(four):
    def job(comm: Comm) -> None:
        for name in HIERARCHICAL:
            for rows in (1, 4099, 300_000):
                one_case(comm, name, rows, 3 if name == "broadcast" else 0, "hierarchical")

    for outcome in four.run(job, 2, timeout_s="60"):
        outcome.get()


def test_hierarchical_is_refused_where_hosts_have_one_rank(two):
    def job(comm: Comm) -> str:
        with pytest.raises(UsageError) as refused:
            comm.all_reduce(np.ones(10), algorithm="hierarchical")
        comm.barrier()
        return str(refused.value)

    for outcome in two.run(job):
        assert "needs several hosts with the same number of ranks" in outcome.get()


# Bytes that leave host 0 of two hosts with two ranks each, in messages.
FRACTIONS = [
    ("all_reduce", "ring", 1.5),  # of four ranks one sends to the other host, 2(n-1)/n
    ("all_reduce", "hierarchical", 1.0),  # 2(H-1)/H
    ("reduce_scatter", "hierarchical", 0.5),
    ("all_gather", "hierarchical", 0.5),
    ("all_to_all", "pairwise", 1.0),
    ("all_to_all", "hierarchical", 1.0),
    ("broadcast", "hierarchical", 1.0),
]


@pytest.mark.parametrize(("name", "algorithm", "fraction"), FRACTIONS)
def test_bytes_between_hosts_are_those_of_the_formula(two, name, algorithm, fraction):
    def job(comm: Comm) -> tuple[int, int]:
        message = 4 << 20
        rows = message // 4
        if name != "all_gather":
            x = np.zeros(rows, np.float32)
        else:
            x = np.zeros(rows // comm.size, np.float32)
        run = getattr(comm, name)
        run(x, algorithm=f"{algorithm}/simple")
        comm.barrier()
        before = sent_here()
        comm.barrier()  # nobody sends more before all have looked
        for _ in range(5):
            run(x, algorithm=f"{algorithm}/simple")
        comm.barrier()
        return sent_here() - before, 5 * message

    outcomes = [outcome.get() for outcome in two.run(job, 2)]
    sent, message = outcomes[0]
    assert sent == pytest.approx(fraction * message, rel=0.03)


def sent_here() -> int:
    """As the interface of the calling process's host counts it."""
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def test_table_measured_on_one_host_says_nothing_of_several(two, tmp_path, monkeypatch):
    rows = [
        size(ranks=4, arrays=arrays, nbytes=nbytes, cores=cores, tree__simple=1e-6)
        for arrays in ("plain", "mapped")
        for nbytes in (4096, 64 << 20)
        for cores in (CORES, 2 * CORES)
    ]
    monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path))
    tuning.save([], rows)

    def job(comm: Comm) -> str:
        return comm.explain("all_reduce", 16 << 20, np.float32)

    for outcome in two.run(job, 2):
        first = outcome.get().splitlines()[0]
        assert "hierarchical" in first, outcome.get()


def test_large_messages_go_hierarchically_without_being_asked(two):
    def job(comm: Comm) -> str:
        return comm.explain("all_reduce", 16 << 20, np.float32)

    for outcome in two.run(job, 2):
        first = next(line for line in outcome.get().splitlines() if "hierarchical" in line)
        assert first, outcome.get()
