"""Formulas of collectives against the simulator of clusters, and fits of measured times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pycoll import UsageError, topology
from pycoll.bench.fit import fit_links
from pycoll.parallel.planner.network import Network

pytestmark = pytest.mark.pure

CLUSTERS = Path(__file__).resolve().parents[3] / "examples" / "topologies"


@pytest.mark.parametrize("file", ["a100_hosts", "nvlink_hosts", "fat_tree"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_hierarchical_collectives_take_the_simulated_time(file, collective):
    whole = topology.load(CLUSTERS / f"{file}.toml")
    cluster = whole.resized(2 * whole.num_ranks // whole.levels[-1].size)
    groups = [level.name for level in cluster.levels[:-1]]
    network = Network(cluster, {"dp": cluster.num_ranks}, ("hierarchical",))
    for nbytes in (1 << 20, 1 << 28):
        simulated = cluster.simulate(collective, "hierarchical", nbytes, groups=groups).time_s
        assert network.collective_s(collective, nbytes, "dp") == pytest.approx(simulated, rel=0.01)


def test_a_ring_takes_the_simulated_time_of_large_payloads():
    cluster = topology.load(CLUSTERS / "a100_hosts.toml").resized(32)
    network = Network(cluster, {"dp": 32}, ("ring",))
    for nbytes in (1 << 28, 1 << 30):
        simulated = cluster.simulate("all_reduce", "ring", nbytes).time_s
        assert network.collective_s("all_reduce", nbytes, "dp") == pytest.approx(
            simulated, rel=0.02
        )


def test_axes_use_the_links_where_their_ranks_are():
    cluster = topology.load(CLUSTERS / "a100_hosts.toml")
    network = Network(cluster, {"tp": 8, "dp": 4}, ("ring",))
    inside = network.collective_s("all_reduce", 1 << 28, "tp")
    outside = network.collective_s("all_reduce", 1 << 28, "dp")
    assert inside < outside / 5
    assert network.collective_s("all_reduce", 1 << 28, "cp") == 0
    # Two ranks of tp: four groups of dp in a host, each with one rank: each has its own NIC.
    nbytes, links = 1e9, cluster.levels[1]
    message = Network(cluster, {"pp": 4, "tp": 8}).message_s(nbytes, "pp")
    assert message == pytest.approx(nbytes / links.link_bytes_per_s + links.latency_s)
    with pytest.raises(UsageError, match="the mesh has 2048 ranks, cluster .* has 1536"):
        Network(cluster, {"dp": 2048})


def test_fits_recover_injected_latency_and_bandwidth():
    draw = random.Random(5)
    alpha, beta, gamma, n = 12e-6, 1 / 5e9, 1 / 20e9, 4
    rows = []
    for nbytes in [1 << k for k in range(8, 26, 2)]:
        for name, factor, reduced in (("all_reduce", 2, 1), ("all_gather", 1, 0)):
            sent = (n - 1) / n * nbytes
            exact = factor * ((n - 1) * alpha + sent * beta) + reduced * sent * gamma
            rows.append((name, nbytes, exact * draw.uniform(0.99, 1.01)))
    found = fit_links(rows, n)
    assert found.alpha_s == pytest.approx(alpha, rel=0.05)
    assert found.beta_s_per_byte == pytest.approx(beta, rel=0.05)
    assert found.gamma_s_per_byte == pytest.approx(gamma, rel=0.2)
    assert found.r_squared > 0.999
    assert found.seconds("all_gather", 1 << 20, n) == pytest.approx(
        (n - 1) * alpha + 0.75 * (1 << 20) * beta, rel=0.05
    )
    with pytest.raises(UsageError, match="fit: no formula for 'scan'"):
        fit_links([("scan", 1, 1.0)] * 3, 4)
