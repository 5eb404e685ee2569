"""Simulated times against the formulas of the literature, and against the simulator of events."""

import math

import pytest
from cases import each_case
from clusters import fat_tree, hosts

from pycoll import _core, schedule, topology
from pycoll.topology import Level, Straggler, Topology

pytestmark = pytest.mark.pure

ALPHA, BETA, GAMMA = 3e-6, 2e-9, 5e-10  # seconds, seconds per byte
RANKS = (16, 64, 256)
PIECES = 4  # of each of the two trees
of_ranks_and_sizes = each_case(
    "n, nbytes", [(n, nbytes) for n in RANKS for nbytes in (1 << 10, 1 << 20, 1 << 30)]
)


def one_switch(n, alpha=ALPHA, beta=BETA, gamma=GAMMA):
    # Half of alpha holds the rank, half is on the way: rings and exchanges see only the sum.
    return topology.uniform(
        n,
        overhead_s=alpha / 2,
        latency_s=alpha / 2,
        link_bytes_per_s=1 / beta,
        gamma_s_per_byte=gamma,
    )


@of_ranks_and_sizes
def test_ring_equals_the_closed_form(n, nbytes):
    time_s = one_switch(n).simulate("all_reduce", "ring", nbytes).time_s
    chunk = nbytes / n
    expected_s = 2 * (n - 1) * (ALPHA + BETA * chunk) + (n - 1) * GAMMA * chunk
    assert time_s == pytest.approx(expected_s, rel=1e-9)


@of_ranks_and_sizes
def test_halving_doubling_equals_the_closed_form(n, nbytes):
    time_s = one_switch(n).simulate("all_reduce", "halving_doubling", nbytes).time_s
    others = (n - 1) / n
    expected_s = 2 * math.log2(n) * ALPHA + others * (2 * BETA + GAMMA) * nbytes
    assert time_s == pytest.approx(expected_s, rel=1e-9)


@of_ranks_and_sizes
def test_binomial_tree_equals_the_closed_form(n, nbytes):
    # A rank that sends to another one goes on while the message is under way: overhead alone.
    cluster = topology.uniform(
        n, overhead_s=ALPHA, latency_s=0, link_bytes_per_s=1 / BETA, gamma_s_per_byte=GAMMA
    )
    time_s = cluster.simulate("all_reduce", "reduce_broadcast", nbytes).time_s
    rounds = math.log2(n)
    expected_s = 2 * rounds * (ALPHA + BETA * nbytes) + rounds * GAMMA * nbytes
    assert time_s == pytest.approx(expected_s, rel=1e-9)


@each_case("n", RANKS)
def test_double_binary_tree_equals_the_closed_form(n):
    """Up lg n and down lg n levels; every further piece follows at the pace of the busiest part."""
    nbytes, lg = 1 << 23, math.log2(n)
    piece = nbytes / (2 * PIECES)

    def time_s(**costs):
        costs = {"latency_s": 0.0, "link_bytes_per_s": 1e30} | costs
        cluster = topology.uniform(n, **costs)
        return cluster.simulate("all_reduce", "tree", nbytes, tile_bytes=nbytes).time_s

    # Messages that are under way do not delay each other.
    assert time_s(latency_s=1.0) == pytest.approx(2 * lg + PIECES - 1, rel=1e-6)
    # Two children at each level; while a piece is combined, the next one waits.
    assert time_s(gamma_s_per_byte=1.0) == pytest.approx((2 * lg + 2 * (PIECES - 1)) * piece)
    # Two children share the port of their parent, up and down; a rank's port carries four
    # messages per piece, two of them as a leaf of the other tree.
    expected_s = (4 * lg + 4 * PIECES - 2) * piece
    assert time_s(link_bytes_per_s=1.0) == pytest.approx(expected_s, rel=0.01)


@of_ranks_and_sizes
@each_case("between", ["ring", "halving_doubling"])
def test_hierarchical_equals_the_closed_form(n, nbytes, between):
    m, inside_s, inside_beta, outside_s, outside_beta = 8, 1e-6, 1 / 400e9, 5e-6, 1 / 50e9
    cluster = Topology(
        levels=(
            Level(name="host", size=m, link_bytes_per_s=400e9, latency_s=1e-6),
            Level(name="cluster", size=n // m, num_links=m, link_bytes_per_s=50e9, latency_s=5e-6),
        ),
        gamma_s_per_byte=1e-12,
    )
    num_hosts, shard = n // m, nbytes / m
    expected_s = 2 * (m - 1) * (inside_s + inside_beta * shard) + (m - 1) * 1e-12 * shard
    rounds = 2 * (num_hosts - 1) if between == "ring" else 2 * math.log2(num_hosts)
    others = (num_hosts - 1) / num_hosts
    expected_s += rounds * outside_s + others * (2 * outside_beta + 1e-12) * shard
    one = cluster.simulate("all_reduce", "hierarchical", nbytes, between=between)
    assert one.time_s == pytest.approx(expected_s, rel=1e-9)
    assert one.algorithm == f"hierarchical:host/{between}"


@each_case("n", [64, 256])
def test_hierarchy_of_three_levels_equals_the_closed_form(n):
    m, racks, nbytes = 4, 4, 1 << 20
    per_rack = n // (m * racks)
    cluster = Topology(
        levels=tuple(
            Level(name=name, size=size, num_links=lanes, link_bytes_per_s=rate, latency_s=alpha)
            for name, size, lanes, rate, alpha in (
                ("host", m, 1, 100e9, 1e-6),
                ("rack", per_rack, m, 50e9, 2e-6),
                ("spine", racks, m * per_rack, 25e9, 4e-6),
            )
        )
    )
    one = cluster.simulate("all_reduce", "hierarchical", nbytes, groups=["host", "rack"])
    expected_s, left = 0.0, nbytes
    for size, rate, alpha in ((m, 100e9, 1e-6), (per_rack, 50e9, 2e-6), (racks, 25e9, 4e-6)):
        expected_s += 2 * (size - 1) * (alpha + left / size / rate)
        left /= size
    assert one.time_s == pytest.approx(expected_s, rel=1e-9)


# No port takes two messages at a time, whatever n, or for powers of two.
ONE_AT_A_TIME = ("ring", "ring_naive", "all_to_all")
ONE_AT_A_TIME_OF_POWERS = ("halving_doubling", "reduce_broadcast")


@each_case("n", [2, 3, 5, 8, 16])
@each_case("name", [row.name for row in _core.algorithms() if row.collective == "all_reduce"])
def test_one_switch_gives_what_the_simulator_of_events_gives(name, n):
    s = schedule.build("all_reduce", name, n)
    nbytes = 960 * s.num_chunks
    cluster = topology.uniform(
        n, latency_s=0, overhead_s=ALPHA, link_bytes_per_s=1 / BETA, gamma_s_per_byte=GAMMA
    )
    time_s = s.simulate(nbytes, topology=cluster).time_s
    events_s = s.simulate(nbytes, ALPHA, BETA, GAMMA).time_s
    is_power = n & (n - 1) == 0
    if name in ONE_AT_A_TIME or (is_power and name in ONE_AT_A_TIME_OF_POWERS):
        assert time_s == pytest.approx(events_s, rel=1e-9)
    else:  # receiving ports: there a queue that alpha is part of, here a shared link
        assert time_s == pytest.approx(events_s, rel=0.5)


@each_case("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@each_case("n", [1, 2, 3, 8, 24])
def test_ring_without_moves_is_the_ring_of_moves(collective, n):
    slow = Straggler(level="rank", units=(n // 2,), compute_factor=3, link_factor=0.5, delay_s=1e-5)
    cluster = Topology(
        levels=(Level(name="switch", size=n, link_bytes_per_s=1e9, latency_s=1e-6),),
        overhead_s=1e-6,
        gamma_s_per_byte=1e-10,
        stragglers=(slow,),
    )
    of_moves = schedule.build(collective, "ring", n).simulate(24_000, topology=cluster)
    of_script = cluster.simulate(collective, "ring", 24_000)
    assert of_script.rank_time_s == pytest.approx(of_moves.rank_time_s, rel=1e-9)
    assert [use.nbytes for use in of_script.levels] == pytest.approx(
        [use.nbytes for use in of_moves.levels]
    )


@each_case("num_hosts, per_host", [(1, 4), (4, 1), (2, 2), (3, 4), (8, 8)])
def test_hierarchical_without_moves_is_that_of_moves(num_hosts, per_host):
    n = num_hosts * per_host
    s = schedule.build_hierarchical("all_reduce", n, per_host)
    for cluster in (
        hosts(num_hosts, per_host, gamma_s_per_byte=0.1, overhead_s=0.5),
        fat_tree(1, num_hosts, per_host),
    ):
        of_moves = s.simulate(960 * n, topology=cluster)
        of_script = cluster.simulate("all_reduce", "hierarchical", 960 * n)
        assert of_script.time_s == pytest.approx(of_moves.time_s, rel=1e-9)
