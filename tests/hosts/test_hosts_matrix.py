"""What several hosts must show: two and four of them with two ranks each, 1 Gbit/s, packets that
take 0.5 ms or no time; over TCP and over every MPI that is here. All collectives equal NumPy, and
what the interfaces count is what the schedules say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import mpi_kit
import pytest
from delayed import DelayedNetwork, why_not_delayed
from host_jobs import FORMULAS, Hosts, every_algorithm, sent_per_message_of_all
from namespaces import Network

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]

PER_HOST = 2
DELAY_S = 0.5e-3


@pytest.fixture(scope="module", params=[2, 4], ids=["2 hosts", "4 hosts"])
def num_hosts(request) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=[0.0, DELAY_S], ids=["no delay", "0.5 ms"])
def hosts(num_hosts: int, request) -> Iterator[Network]:
    delay_s: float = request.param
    if delay_s and (why := why_not_delayed()):
        pytest.skip(why)
    if delay_s:
        network: Network = DelayedNetwork(num_hosts, name=f"pyc{os.getpid()}d")
    else:
        network = Network(num_hosts, name=f"pyc{os.getpid()}m")
    try:
        if isinstance(network, DelayedNetwork):
            network.set_delay(delay_s)
        network.set_rate("1gbit")
        yield network
    finally:
        network.close()


LINKS = pytest.mark.parametrize("links", ["tcp", "mpich", "impi"])


@LINKS
def test_every_collective_and_algorithm_equals_numpy(hosts: Network, links: str):
    places = [(links if links == "tcp" else "mpi", i) for i in range(PER_HOST)] * hosts.n
    if links == "tcp":
        pids = hosts.start_ranks(every_algorithm, PER_HOST, timeout_s="60")
        assert [hosts.outcome(pid, 250).get() for pid in pids] == places
    else:
        results = over_mpi(hosts, links, "collectives")
        assert [tuple(result[:2]) for result in results] == places


@LINKS
def test_bytes_that_leave_each_host_are_those_of_the_formula(hosts: Network, links: str):
    if links == "tcp":
        pids = hosts.start_ranks(sent_per_message_of_all, PER_HOST, timeout_s="60")
        sent_by_rank = [hosts.outcome(pid, 250).get() for pid in pids]
    else:
        sent_by_rank = [result[2] for result in over_mpi(hosts, links, "bytes_of_all")]
    wrong = []
    for (name, algorithm), formula in FORMULAS.items():
        of_hosts = [float(formula(Hosts(host, hosts.n, PER_HOST))) for host in range(hosts.n)]
        for host, expected in enumerate(of_hosts):
            sent = sent_by_rank[host * PER_HOST][f"{name}/{algorithm}"]
            text = f"{name}/{algorithm}: host {host} sent {sent:.4f} messages, formula {expected}"
            print(text)
            # Where no message leaves, credits and acknowledgements of those that come do.
            if abs(sent - expected) > (0.03 * expected if expected else 0.01 * sum(of_hosts)):
                wrong.append(text)
    assert not wrong, "\n".join(wrong)


def over_mpi(hosts: Network, name: str, job: str) -> list[Any]:
    return mpi_kit.run(mpi_kit.need(name), hosts, PER_HOST, job, 250, PYCOLL_TRANSPORT="mpi")
