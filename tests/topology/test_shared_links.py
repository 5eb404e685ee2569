"""Links that messages share, stragglers and jitter, against calculations by hand."""

import pytest
from cases import each_case
from clusters import fat_tree, hosts

from pycoll import UsageError, _core, schedule, topology
from pycoll.topology import Jitter, Level, Straggler, Topology

pytestmark = pytest.mark.pure


def moves(n, rows, num_chunks):
    """A schedule of copies (round, chunk, src, dst); what it computes does not matter here."""
    rows = [(round, "copy", chunk, 1, src, dst) for round, chunk, src, dst in rows]
    core = _core.schedule_from_moves("all_gather", "by_hand", n, num_chunks, 0, rows)
    return schedule.Schedule(core)


# Sharing.


def test_a_message_that_comes_later_slows_the_first_one_from_then_on():
    # Rank 1 enters 4 s later. Until then rank 0 has moved 4 of 10 bytes, then both get 1/2: rank 0
    # needs 12 s more. Then rank 1, which has moved 6, is alone.
    late = Straggler(level="rank", units=(1,), delay_s=4)
    s = moves(4, [(0, 0, 0, 2), (0, 1, 1, 3)], 4)
    done = s.simulate(40, topology=hosts(2, 2, stragglers=(late,))).rank_time_s
    assert done[0] == pytest.approx(4 + 12)
    assert done[1] == pytest.approx(4 + 12 + 4)


def test_shared_uplink_makes_the_far_exchange_as_slow_as_its_messages_are_many():
    # Halving and doubling of 2 hosts of 4: first and last, all 4 ranks of a host send half of the
    # message over its uplink of 1 B/s; then quarters and eighths inside, at 8 B/s.
    nbytes = 64
    time_s = hosts(2, 4).simulate("all_reduce", "halving_doubling", nbytes).time_s
    expected_s = 2 * (4 * nbytes / 2 / 1 + nbytes / 4 / 8 + nbytes / 8 / 8)
    assert time_s == pytest.approx(expected_s)
    lanes = hosts(2, 4, outer={"num_links": 4})
    expected_s = 2 * (nbytes / 2 / 1 + nbytes / 4 / 8 + nbytes / 8 / 8)
    assert lanes.simulate("all_reduce", "halving_doubling", nbytes).time_s == pytest.approx(
        expected_s
    )


def test_ring_has_a_shared_uplink_to_itself():
    one, four = (
        hosts(4, 4, outer={"num_links": lanes}).simulate("all_reduce", "ring", 1600)
        for lanes in (1, 4)
    )
    assert one.time_s == pytest.approx(2 * 15 * 100 / 1)
    assert one.time_s == pytest.approx(four.time_s)


def test_circuit_of_a_pair_is_shared_by_its_messages_and_has_its_own_latency():
    pairs = ((0.0, 0.5, 1.0), (0.25, 0.0, 1.0), (1.0, 1.0, 0.0))
    latencies = ((0.0, 7.0, 0.0), (3.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    outer = {"link_bytes_per_s": 4.0, "pair_bytes_per_s": pairs, "pair_latency_s": latencies}
    cluster = hosts(3, 2, outer=outer)
    there = moves(6, [(0, 0, 0, 2), (0, 1, 1, 3)], 6)
    back = moves(6, [(0, 2, 2, 0)], 6)
    assert there.simulate(60, topology=cluster).time_s == pytest.approx(20 / 0.5 + 7)
    assert back.simulate(60, topology=cluster).time_s == pytest.approx(10 / 0.25 + 3)


def test_rails_are_changed_inside_the_host():
    inner = {"carries_outside": False}
    plain = hosts(2, 2, inner=inner, outer={"num_links": 2})
    rails = hosts(2, 2, inner=inner, outer={"num_links": 2, "rails": True})

    def names(cluster, src, dst):
        fabric = cluster.fabric()
        return [fabric.link_name(link) for link in fabric.route(src, dst)]

    assert names(rails, 0, 2) == ["host 0, link 0 up", "host 1, link 0 down"]
    assert names(plain, 0, 3) == ["host 0, link 0 up", "host 1, link 1 down"]
    assert names(rails, 0, 3) == [
        "rank 0 up",
        "rank 1 down",
        "host 0, link 1 up",
        "host 1, link 1 down",
    ]


# Stragglers.


def ring_cluster(n, **options):
    level = Level(name="switch", size=n, link_bytes_per_s=1.0, latency_s=0.25)
    return Topology(levels=(level,), **options)


def test_rank_with_half_the_bandwidth_sets_the_pace_of_the_ring():
    n, chunk = 8, 10
    slow = Straggler(level="rank", units=(3,), link_factor=0.5)
    time_s = ring_cluster(n, stragglers=(slow,)).simulate("all_reduce", "ring", n * chunk).time_s
    # All of its 2(n-1) messages go out at half the rate, one after the other: before the second one
    # it waits for what its predecessor sent at half the rate, too, and the last one has to arrive.
    assert time_s == pytest.approx(2 * (n - 1) * chunk / 0.5 + 2 * 0.25)


def test_rank_that_enters_late_makes_the_ring_as_late():
    n, chunk = 8, 10
    late = Straggler(level="rank", units=(3,), delay_s=1000)
    time_s = ring_cluster(n, stragglers=(late,)).simulate("all_reduce", "ring", n * chunk).time_s
    assert time_s == pytest.approx(1000 + 2 * (n - 1) * (chunk + 0.25))


def test_rank_that_reduces_slowly_holds_up_the_first_half_of_the_ring():
    n, chunk, gamma = 8, 10, 0.5
    slow = Straggler(level="rank", units=(3,), compute_factor=4)
    cluster = ring_cluster(n, gamma_s_per_byte=gamma, stragglers=(slow,))
    time_s = cluster.simulate("all_reduce", "ring", n * chunk).time_s
    # It sends one, reduces and sends n-1, which arrive while it works; the last one goes round.
    expected_s = (chunk + 0.25) + (n - 1) * (4 * gamma * chunk + chunk) + 0.25
    expected_s += (n - 2) * (chunk + 0.25)
    assert time_s == pytest.approx(expected_s)


def test_host_with_half_the_network_slows_the_part_between_hosts():
    num_hosts, m, nbytes = 4, 4, 1600
    usual = hosts(num_hosts, m, outer={"num_links": m})
    slow = Straggler(level="host", units=(2,), link_factor=0.5)
    slowed = hosts(num_hosts, m, outer={"num_links": m}, stragglers=(slow,))
    shard = nbytes / m / num_hosts
    inside_s = 2 * (m - 1) * nbytes / m / 8
    between_s = 2 * (num_hosts - 1) * shard
    one = usual.simulate("all_reduce", "hierarchical", nbytes)
    assert one.time_s == pytest.approx(inside_s + between_s)
    # Its successor gets everything at half the rate, and has the gathering inside still before it.
    one = slowed.simulate("all_reduce", "hierarchical", nbytes)
    assert one.time_s == pytest.approx(inside_s + 2 * between_s)
    assert one.bottleneck.busiest.startswith("host 2")


# Jitter.


def test_jitter_is_the_same_for_a_seed_and_adds_about_its_mean():
    def time_s(seed, message_s):
        cluster = ring_cluster(16, jitter=Jitter(seed=seed, message_s=message_s))
        return cluster.simulate("all_reduce", "ring", 160).time_s

    quiet_s = time_s(0, 0.0)
    assert time_s(1, 1.0) == time_s(1, 1.0) != time_s(2, 1.0)
    # 30 rounds, each as late as the latest of those that it hangs on.
    for seed in range(4):
        assert quiet_s + 30 < time_s(seed, 1.0) < quiet_s + 30 * 5
        assert quiet_s < time_s(seed, 0.01) < quiet_s + 30 * 0.05


def test_jitter_is_exponential_and_named_as_one_sample():
    sample = [_core.exponential_delay_s(7, at // 99, at % 99, 2.0) for at in range(50 * 99)]
    assert min(sample) > 0
    assert sum(sample) / len(sample) == pytest.approx(2.0, rel=0.05)
    assert sum(value > 2.0 for value in sample) / len(sample) == pytest.approx(0.368, abs=0.02)
    quiet, loud = (
        ring_cluster(4, jitter=Jitter(seed=3, start_s=start_s)).simulate("all_reduce", "ring", 400)
        for start_s in (0.0, 1.0)
    )
    assert quiet.inexact == ()
    assert loud.inexact == ("random delays are one sample, of seed 3",)
    assert loud.time_s > quiet.time_s


# Classes of ranks.


@each_case("name", ["ring", "tree", "halving_doubling", "reduce_broadcast", "star"])
@each_case(
    "cluster",
    [
        hosts(4, 4),
        hosts(3, 4, outer={"num_links": 2}),
        fat_tree(3, 4, 4),
        fat_tree(4, 4, 2, stragglers=(Straggler(level="rack", units=(1,), link_factor=0.3),)),
        fat_tree(4, 2, 2, stragglers=(Straggler(level="host", units=(2, 6), compute_factor=3),)),
    ],
)
def test_classes_of_ranks_give_what_ranks_one_by_one_give(cluster, name):
    for nbytes in (1 << 10, 1 << 24):
        one, all_ranks = (
            cluster.simulate("all_reduce", name, nbytes, compress=compress, timeline=True)
            for compress in (True, False)
        )
        assert all_ranks.num_classes == cluster.num_ranks
        assert one.num_classes <= cluster.num_ranks
        assert one.rank_time_s == pytest.approx(all_ranks.rank_time_s, rel=1e-9)
        for level, parts in one.timeline.utilization.items():
            expected = all_ranks.timeline.utilization[level]
            assert sum(parts) == pytest.approx(sum(expected), rel=1e-6)


def test_ranks_of_a_ring_are_as_many_classes_as_places_in_a_host():
    assert fat_tree(4, 4, 4).prepare("all_reduce", "ring").num_classes == 16
    assert hosts(8, 4).prepare("all_reduce", "ring").num_classes == 4
    assert (
        topology.uniform(64, latency_s=0, link_bytes_per_s=1)
        .prepare("all_reduce", "halving_doubling")
        .num_classes
        == 1
    )
    hierarchical = fat_tree(4, 4, 4).prepare("all_reduce", "hierarchical", groups=["host", "rack"])
    assert hierarchical.num_classes <= 8


# What comes back.


def test_links_carry_what_the_algorithm_sends_and_the_timeline_says_when():
    one = hosts(4, 4).simulate("all_reduce", "ring", 1600, timeline=True)
    host, cluster = one.levels
    assert (host.level, cluster.level) == ("host", "cluster")
    # All 16 ranks send 30 chunks of 100 bytes, up and down; those of 4 ranks leave their host.
    assert host.nbytes == pytest.approx(2 * 16 * 30 * 100)
    assert cluster.nbytes == pytest.approx(2 * 4 * 30 * 100)
    assert one.bottleneck.level == "cluster"
    assert one.bottleneck.busiest_utilization == pytest.approx(1.0)
    assert one.algbw == pytest.approx(1600 / 3000)
    assert one.busbw == pytest.approx(1600 / 3000 * 2 * 15 / 16)
    for use in one.levels:
        parts = one.timeline.utilization[use.level]
        carried = sum(parts) * one.timeline.bin_s
        assert carried == pytest.approx(use.utilization * one.time_s, rel=1e-9)
        assert max(parts) <= 1 + 1e-9


@each_case("nbytes", [0, 1])
def test_almost_nothing_takes_almost_no_time(nbytes):
    one = fat_tree(2, 2, 2).simulate("all_reduce", "tree", nbytes)
    assert one.time_s < 1e-3
    assert (one.time_s == 0) == (nbytes == 0)


def test_what_cannot_be_simulated_is_refused():
    cluster = hosts(2, 2)
    with pytest.raises(UsageError, match="nbytes >= 0"):
        cluster.simulate("all_reduce", "ring", -1)
    with pytest.raises(UsageError, match="24 messages are more than max_messages = 10"):
        cluster.simulate("all_reduce", "ring", 8, compress=False, max_messages=10)
    with pytest.raises(UsageError, match="slots=1 .* wait for each other for ever"):
        cluster.simulate("all_reduce", "ring", 8, slots=1)
    with pytest.raises(UsageError, match="no level is called 'hosts'"):
        cluster.simulate("all_reduce", "hierarchical", 8, groups=["hosts"])
    with pytest.raises(UsageError, match="no hierarchical scripts for broadcast"):
        cluster.simulate("broadcast", "hierarchical", 8)
    with pytest.raises(UsageError, match="no algorithm called 'rung'"):
        cluster.simulate("all_reduce", "rung", 8)
    with pytest.raises(UsageError, match="has 4 ranks, the schedule 3"):
        schedule.build("all_reduce", "ring", 3).simulate(8, topology=cluster)
    with pytest.raises(UsageError, match="a topology replaces"):
        schedule.build("all_reduce", "ring", 4).simulate(8, 1.0, 1.0, topology=cluster)
