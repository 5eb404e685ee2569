"""Two and four hosts with two ranks each at 1 Gbit/s, over TCP and over MPI, with packets that take
0.5 ms or no time. Every collective equals NumPy, and the bytes that the interfaces count are those
of the formulas. Each value of these settings is in at least one of the cases."""

from __future__ import annotations

from typing import Any

import mpi_kit
import pytest
from delayed import throttled
from host_jobs import FORMULAS, differences_from_formulas, every_algorithm, sent_per_message_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PER_HOST = 2
CASES = [(2, 0.5e-3, "tcp"), (4, 0.0, "tcp"), (4, 0.5e-3, "mpich")]


@pytest.mark.parametrize(("num_hosts", "delay_s", "links"), CASES)
def test_every_algorithm_equals_numpy_and_sends_the_bytes_of_the_formula(num_hosts, delay_s, links):
    def bytes_of_all(comm: Any) -> dict[str, float]:
        return sent_per_message_of(comm, FORMULAS)

    with throttled(num_hosts, delay_s) as network:
        if links == "tcp":
            jobs = [every_algorithm, bytes_of_all]
            places, sent = network.run_jobs(jobs, PER_HOST, timeout_s="60")
        else:
            env = {"PYCOLL_TRANSPORT": "mpi"}
            mpi = mpi_kit.need(links)
            results = mpi_kit.run(mpi, network, PER_HOST, "collectives_and_bytes", 250, **env)
            places, sent = zip(*results, strict=True)
    transport = "tcp" if links == "tcp" else "mpi"
    assert [tuple(place) for place in places] == [(transport, 0), (transport, 1)] * num_hosts
    assert not differences_from_formulas(list(sent[::PER_HOST]), PER_HOST)
