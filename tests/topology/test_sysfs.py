"""Domains of hosts from sysfs: servers, and trees of which a part is missing."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import sysfs_trees
from cases import each_case
from sysfs_trees import EPYC_NPS1, EPYC_NPS4, GRACE, GRACE_CPU, SPR, SPR_SNC4, write

from pycoll.errors import UsageError
from pycoll.topology import Jitter, dumps, load, read_host
from pycoll.topology.sysfs import parse_cpus

# tests/command_line.py
from command_line import invoke  # isort: skip

pytestmark = pytest.mark.pure

SERVERS = {
    "epyc nps1": (EPYC_NPS1, {"l3": 8, "socket": 8, "host": 2}),
    "epyc nps4": (EPYC_NPS4, {"l3": 8, "numa": 2, "socket": 4, "host": 2}),
    "spr": (SPR, {"socket": 56, "host": 2}),
    "spr snc4": (SPR_SNC4, {"numa": 14, "socket": 4, "host": 2}),
    "grace": (GRACE, {"host": 72}),
    "grace cpu": (GRACE_CPU, {"socket": 72, "host": 2}),
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sysfs")
    return {
        name: write(folder / name.replace(" ", "_"), server)
        for name, (server, _) in SERVERS.items()
    }


@pytest.fixture
def small(tmp_path):
    """A tree to damage: 2 sockets of 2 nodes with 2 L3s of 2 cores, 2 threads each."""
    server = sysfs_trees.Server(
        sockets=2, nodes=2, cores=4, cores_per_l3=2, threads=2, distances=(10, 12, 32, 32)
    )
    return write(tmp_path / "small", server, links=False)


@each_case("name", SERVERS)
def test_server_has_its_levels(trees, name):
    server, levels = SERVERS[name]
    host = read_host(trees[name])
    assert dict(zip([level.name for level in host.levels], host.sizes, strict=True)) == levels
    assert len(host.cores) == server.num_cores
    assert {len(core) for core in host.cores} == {server.threads}
    assert host.notes == ()
    topology = host.topology()
    assert topology.num_ranks == server.num_cores
    assert [level.name for level in topology.levels] == list(levels)


def test_levels_that_coincide_are_one(trees):
    (socket, host) = read_host(trees["spr"]).levels
    assert (socket.name, socket.also) == ("socket", ("l3", "numa"))
    assert read_host(trees["spr snc4"]).levels[1].also == ("l3",)
    assert read_host(trees["grace"]).levels[0].also == ("l3", "numa", "socket")


def test_distances_and_memory_without_cpus_are_kept(trees):
    grace = read_host(trees["grace"])
    assert grace.distances[0][:2] == (10, 80)
    assert [len(cpus) for cpus in grace.nodes.values()] == [72, *[0] * 8]
    assert "node 1, memory without CPUs: distances 80 10" in grace.describe()
    assert read_host(trees["epyc nps4"]).distances[5] == (32, 32, 32, 32, 12, 10, 12, 12)


def test_smallest_domain_of_two_cpus(trees):
    host = read_host(trees["epyc nps4"])
    expected = {(0, 128): "core", (0, 7): "l3", (0, 8): "numa", (0, 16): "socket", (63, 64): "host"}
    assert {cpus: host.smallest_domain(cpus) for cpus in expected} == expected
    assert host.smallest_domain([0, 256]) is None


def test_ranks_follow_the_tree_where_cpus_alternate_between_sockets(small):
    """Some firmware numbers the cores of the sockets in turn."""
    swap = {cpu: cpu % 16 // 8 + cpu % 8 * 2 + cpu // 16 * 16 for cpu in range(32)}
    for cpu in range(32):
        os.rename(small / f"cpu/cpu{cpu}", small / f"cpu/old{cpu}")
    for cpu in range(32):
        os.rename(small / f"cpu/old{cpu}", small / f"cpu/cpu{swap[cpu]}")
    for path in [*small.glob("cpu/cpu*/*/*list"), *small.glob("cpu/cpu*/*/*/*list")]:
        path.write_text(_renumbered(path.read_text(), swap))
    for path in small.glob("node/node*/cpulist"):
        path.write_text(_renumbered(path.read_text(), swap))
    host = read_host(small)
    assert host.sizes == (2, 2, 2, 2)
    assert [core[0] for core in host.cores] == [*range(0, 16, 2), *range(1, 16, 2)]


def _renumbered(text, number):
    return sysfs_trees.listed(sorted(number[cpu] for cpu in parse_cpus(text, "")))


def test_affinity_and_offline_cpus_leave_a_part_of_the_host(small):
    (small / "cpu/online").write_text("0-15\n")  # no second threads
    for cpu in range(16, 32):
        shutil.rmtree(small / f"cpu/cpu{cpu}/topology")  # as the kernel does
        shutil.rmtree(small / f"cpu/cpu{cpu}/cache")
    host = read_host(small)
    assert [len(core) for core in host.cores] == [1] * 16
    assert host.sizes == (2, 2, 2, 2)
    one_socket = read_host(small, cpus=range(8, 20))
    assert one_socket.sizes == (2, 2, 2)
    assert [level.name for level in one_socket.levels] == ["l3", "numa", "host"]
    assert "8 cores, 8 of 16 CPUs that are online" in one_socket.describe()
    assert read_host(small, cpus=[0]).sizes == (1,)
    with pytest.raises(UsageError, match="none of the 16 CPUs"):
        read_host(small, cpus=[16])


def test_uneven_domains_are_described_but_have_no_topology(small):
    host = read_host(small, cpus=[0, 1, 2, *range(4, 16)])
    assert host.smallest_domain([0, 2]) == "numa"
    assert "l3: 8 of 1 or 2 cores" in host.describe()
    with pytest.raises(UsageError, match="the l3 domains of this host have 1 or 2 cores"):
        host.topology()


def test_missing_parts_leave_out_their_level(small):
    shutil.rmtree(small / "node")
    for path in small.glob("cpu/cpu*/topology/physical_package_id"):
        path.write_text("-1\n")
    host = read_host(small)
    assert host.sizes == (2, 8)
    assert [note.partition(":")[0] for note in host.notes] == [
        "sysfs has no NUMA node for 32 CPUs",
        "sysfs has no socket for 32 CPUs",
    ]
    (small / "cpu/online").unlink()
    shutil.rmtree(small / "cpu/cpu3/cache")
    assert [level.name for level in read_host(small).levels] == ["host"]


def test_levels_that_overlap_are_refused(small):
    # Nodes that begin in the middle of an L3.
    for node in range(4):
        cores = [(node * 4 + 1 + i) % 16 for i in range(4)]
        cpus = sorted([*cores, *(core + 16 for core in cores)])
        (small / f"node/node{node}/cpulist").write_text(sysfs_trees.listed(cpus))
    with pytest.raises(UsageError, match="expected levels inside each other"):
        read_host(small)


@each_case("text", ["0-", "a", "3-1", "0-99999999", "1,,2", "-1"])
def test_file_without_a_list_of_cpus_is_refused(small, text):
    (small / "cpu/online").write_text(text)
    with pytest.raises(UsageError, match="online: "):
        read_host(small)


def test_folder_that_is_not_sysfs_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder of sysfs"):
        read_host(tmp_path)


def test_this_machine_can_be_read():
    host = read_host(cpus=os.sched_getaffinity(0))
    assert sum(map(len, host.cores)) == len(os.sched_getaffinity(0))


@each_case("costs", [{"latency_s": {"l4": 1.0}}, {"link_bytes_per_s": {"host": 1.0}}])
def test_cost_of_an_unknown_level_is_refused(small, costs):
    with pytest.raises(UsageError, match="no level is called"):
        read_host(small).topology(**costs)


def test_info_shows_a_copied_tree_and_writes_its_topology(small, tmp_path):
    out = tmp_path / "host.toml"
    text = invoke("info", "--host", "--sysfs", str(small), "-o", str(out))
    assert "socket: 2 of 8 cores, made of numa domains" in text
    assert load(out) == read_host(small).topology()
    found = json.loads(invoke("info", "--host", "--json"))
    assert found["levels"][-1]["name"] == "host"
    assert "need --host" in invoke("info", "-o", str(out), status=2)
    cluster = read_host(small).topology()
    with pytest.raises(UsageError, match="are not written"):
        dumps(replace(cluster, jitter=Jitter(seed=1)))
