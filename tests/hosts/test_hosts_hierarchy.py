"""Schedules made for hosts: results, the bytes that leave a host, and when they are chosen."""

from __future__ import annotations

import re

import numpy as np
import pytest
from host_jobs import FORMULAS, HIERARCHICAL, TO_HOSTS, Hosts, one_case, sent_per_message
from tuning_tables import CORES, size

import pycoll
from pycoll import UsageError, tuning

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_hierarchical_schedule_equals_numpy(two, name):
    def job(comm: Comm) -> None:
        for protocol in ("simple", "ll"):
            for rows in (0, 1, 3, 4099, 300_000):
                for root in range(comm.size) if name == "broadcast" and rows == 4099 else (0,):
                    one_case(comm, name, rows, root, f"hierarchical/{protocol}")

    for outcome in two.run(job, 2):
        outcome.get()


def test_hierarchical_is_refused_where_hosts_have_one_rank(two):
    def job(comm: Comm) -> str:
        with pytest.raises(UsageError) as refused:
            comm.all_reduce(np.ones(10), algorithm="hierarchical")
        comm.barrier()
        return str(refused.value)

    for outcome in two.run(job):
        assert "on several hosts, each with the same number" in outcome.get()


@pytest.mark.parametrize(("name", "algorithm"), TO_HOSTS)
def test_bytes_between_hosts_are_those_of_the_formula(two, name, algorithm):
    def job(comm: Comm) -> float:
        return sent_per_message(comm, name, algorithm)

    expected = FORMULAS[name, algorithm](Hosts(0, 2, 2))
    assert two.run(job, 2)[0].get() == pytest.approx(expected, rel=0.03)


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


@pytest.mark.parametrize(("rate", "gbit_per_s"), [("100mbit", 0.1), ("1gbit", 1.0)])
def test_costs_between_hosts_are_those_of_the_network(two, rate, gbit_per_s):
    def job(comm: Comm) -> str:
        texts = [comm.explain("all_reduce", 1 << 20)]
        part = comm.split(0, key=-comm.rank)  # knows it, too
        texts.append(part.explain("all_reduce", 1 << 20))
        return "\n".join(line for text in texts for line in text.splitlines() if "Gbit/s" in line)

    two.set_rate(rate)
    try:
        outcomes = [outcome.get() for outcome in two.run(job, 2)]
    finally:
        two.set_rate(None)
    assert len(set(outcomes)) == 1
    found = re.findall(r"between hosts: (.+) us and (.+) Gbit/s, measured", outcomes[0])
    assert len(found) == 2 and found[0] == found[1]
    # A link's burst is sent at once; what else the machine does makes it slower.
    assert 0.5 * gbit_per_s < float(found[0][1]) < 2 * gbit_per_s


def test_large_messages_go_hierarchically_without_being_asked(two):
    def job(comm: Comm) -> str:
        return comm.explain("all_reduce", 16 << 20, np.float32)

    for outcome in two.run(job, 2):
        first = next(line for line in outcome.get().splitlines() if "hierarchical" in line)
        assert first, outcome.get()
