"""Clusters from TOML: the examples, and what is said about mistakes."""

from pathlib import Path

import pytest
from cases import each_case

import pycoll
from pycoll import UsageError, topology

pytestmark = pytest.mark.pure

EXAMPLES = sorted((Path(pycoll.__file__).parents[1] / "examples" / "topologies").glob("*.toml"))
GOOD = """
name = "two hosts"

[ranks]
overhead_ns = 500
reduce_gb_per_s = 100

[[level]]
name = "host"
size = 4
link_gb_per_s = 400
latency_us = 1

[[level]]
name = "cluster"
size = 2
num_links = 4
link_gbit_per_s = 400
latency_ms = 0.005

[[straggler]]
level = "host"
units = [1]
link_factor = 0.5
delay_us = 20

[jitter]
seed = 7
message_us = 0.5
"""


def test_file_says_what_the_cluster_is(tmp_path):
    (tmp_path / "cluster.toml").write_text(GOOD)
    cluster = topology.load(tmp_path / "cluster.toml")
    assert cluster.name == "two hosts"
    assert cluster.num_ranks == 8
    assert cluster.overhead_s == pytest.approx(5e-7)
    assert cluster.gamma_s_per_byte == pytest.approx(1e-11)
    host, outer = cluster.levels
    assert (host.name, host.size, host.link_bytes_per_s) == ("host", 4, 400e9)
    assert (outer.num_links, outer.link_bytes_per_s) == (4, 50e9)
    assert (host.latency_s, outer.latency_s) == pytest.approx((1e-6, 5e-6))
    (slow,) = cluster.stragglers
    assert (slow.level, slow.units, slow.link_factor) == ("host", (1,), 0.5)
    assert slow.delay_s == pytest.approx(2e-5)
    assert (cluster.jitter.seed, cluster.jitter.start_s) == (7, 0.0)
    assert cluster.jitter.message_s == pytest.approx(5e-7)
    assert cluster.ranks_per("host") == 4 and cluster.num_units("host") == 2


@each_case("path", EXAMPLES)
def test_every_example_is_simulated(path):
    cluster = topology.load(path)
    assert cluster.name
    if not cluster.levels[-1].pair_latency_s:
        cluster = cluster.resized(cluster.num_ranks // cluster.levels[-1].size * 2)
    ring = cluster.simulate("all_reduce", "ring", 1 << 20)
    composed = cluster.simulate("all_reduce", "hierarchical", 1 << 20)
    assert 0 < composed.time_s < ring.time_s


def test_there_is_an_example_of_each_kind():
    kinds = {"nvlink_hosts", "fat_tree", "rails", "wan", "stragglers"}
    assert kinds <= {path.stem for path in EXAMPLES}


@each_case(
    "old, new, message",
    [
        ("latency_us", "latancy_us", r"\[\[level\]\] 1 \(host\): unknown key 'latancy_us': did you"
         " mean 'latency_us'"),
        ("[jitter]", "[jiter]", "unknown key 'jiter': did you mean 'jitter'"),
        ("link_gb_per_s", "link", "'link' has no unit: expected one of link_tbit_per_s"),
        ("latency_us = 1", "latency = 1", "'latency' has no unit: expected one of latency_s,"),
        ("link_gb_per_s = 400", "", "'link' is missing: expected one of link_tbit_per_s"),
        ("size = 4", "", "'size' is missing"),
        ("size = 4", "sizes = 4", "unknown key 'sizes': did you mean 'size'"),
        ("link_gb_per_s", "link_gbs", "unknown key 'link_gbs': did you mean 'link_gb_per_s'"),
        ("size = 4", "size = 4.5", "size: expected a whole number, got 4.5"),
        ("size = 4", "size = true", "size: expected a whole number, got True"),
        ("size = 4", "size = 0", "level 'host': expected size >= 1, got 0"),
        ("latency_us = 1", "latency_us = -1", "latency_us: expected a number of at least 0"),
        ("latency_us = 1", "latency_us = 'far'", "latency_us: expected a number, got 'far'"),
        ("latency_us = 1", "latency_us = 1\nlatency_ns = 5", "latency_us and latency_ns say the"),
        ("num_links = 4", "num_links = 0", "expected num_links >= 1"),
        ("link_gbit_per_s = 400", "link_gbit_per_s = 0", "a link bandwidth above 0"),
        ("link_gbit_per_s = 400", "link_gbit_per_s = [1, 2]", "link: expected one number, got 2"),
        ("size = 2", "size = 2\npair_gb_per_s = [[0, 1]]", "pair: expected 2 x 2 numbers"),
        ('name = "cluster"', 'name = "host"', "a second level is called 'host'"),
        ('level = "host"', 'level = "hots"', "no level is called 'hots': expected one of rank"),
        ("units = [1]", "units = [2]", "straggler host 2: expected a number below 2"),
        ("units = [1]", "units = []", "units: expected numbers such as"),
        ('level = "host"', 'level = "cluster"', "straggler cluster 1: expected a number below 1"),
        ("link_factor = 0.5", "link_factor = 0", "link_factor: expected a number above 0, got 0"),
        ("seed = 7", "seed = -7", "seed: expected a number of at least 0"),
        ("[ranks]", "[ranks", "is not TOML"),
        ("[ranks]\noverhead_ns = 500", "ranks = 3", "expected a table, got 3|is not TOML"),
    ],
)  # fmt: skip
def test_mistake_is_named_with_its_place_and_what_was_meant(old, new, message):
    assert old in GOOD
    with pytest.raises(UsageError, match=message) as error:
        topology.loads(GOOD.replace(old, new, 1), source="mine.toml")
    assert str(error.value).startswith("mine.toml")
    assert "\n" not in str(error.value)


def test_empty_and_missing_files_are_named(tmp_path):
    with pytest.raises(UsageError, match="at least one"):
        topology.loads("")
    with pytest.raises(UsageError, match="cannot read the topology .*nowhere.toml"):
        topology.load(tmp_path / "nowhere.toml")


def test_resized_cluster_has_more_or_fewer_outermost_members():
    cluster = topology.loads(GOOD)
    assert cluster.resized(40).num_units("host") == 10
    assert cluster.resized(8) is cluster
    assert cluster.resized(4).stragglers == ()
    with pytest.raises(UsageError, match="multiple of 4"):
        cluster.resized(10)
    wan = next(path for path in EXAMPLES if path.stem == "wan")
    with pytest.raises(UsageError, match="fixed size"):
        topology.load(wan).resized(1024)
