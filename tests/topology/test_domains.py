"""Collectives on the domains of servers: what crosses the sockets, and what each round crosses."""

import os
from dataclasses import replace

import pytest
from cases import each_case
from sysfs_trees import EPYC_NPS1, EPYC_NPS4, SPR_SNC4, Server, write

import pycoll
from pycoll import schedule, topology
from pycoll.topology import crossing, sysfs

pytestmark = pytest.mark.usefixtures("registered_schedules_are_forgotten")

NBYTES = 1 << 20
# One thread for each core: fewer files.
SERVERS = {"epyc nps1": EPYC_NPS1, "epyc nps4": EPYC_NPS4, "spr snc4": SPR_SNC4}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    return {
        name: topology.read_host(write(folder / name, replace(of, threads=1)))
        for name, of in SERVERS.items()
    }


def sent_between_sockets(result):
    """Payloads that all sockets together send out; each is carried up and down."""
    return result.levels[-1].nbytes / 2 / result.nbytes


@pytest.mark.pure
@each_case("split", [True, False])
def test_simulated_bytes_between_sockets_are_the_minimum(hosts, split):
    for name, host in hosts.items():
        cluster = host.topology()
        for collective in schedule.register_levels("domains", host.sizes, split=split):
            result = cluster.simulate(collective, "domains", NBYTES)
            least = 2 if collective == "all_reduce" else 1
            assert sent_between_sockets(result) == pytest.approx(least), (name, collective)


@pytest.mark.pure
def test_flat_algorithms_send_more_between_sockets(hosts):
    cluster = hosts["epyc nps4"].topology()
    for name in ("ring", "tree", "halving_doubling"):
        assert sent_between_sockets(cluster.simulate("all_reduce", name, NBYTES)) > 3
    groups = [level.name for level in cluster.levels[:-1]]
    rings = cluster.simulate("all_reduce", "hierarchical", NBYTES, groups=groups)
    assert sent_between_sockets(rings) == pytest.approx(2)


@pytest.mark.pure
def test_simulated_time_prefers_levels_until_rings_fill_the_links(hosts):
    """Simulated, so the same on every machine: docs/simulation.md has the table."""
    host = hosts["epyc nps1"]
    cluster = host.topology()
    schedule.register_levels("parts", host.sizes)
    schedule.register_levels("leaders", host.sizes, split=False)

    def fastest(nbytes):
        names = ("ring", "tree", "halving_doubling", "parts", "leaders")
        return min(names, key=lambda name: cluster.simulate("all_reduce", name, nbytes).time_s)

    assert [fastest(nbytes) for nbytes in (64, 64 << 10, 64 << 20)] == ["leaders", "parts", "ring"]


@pytest.mark.pure
def test_own_costs_of_a_level_decide_the_time(hosts):
    host = hosts["epyc nps1"]
    schedule.register_levels("parts", host.sizes)
    slow = host.topology(latency_s={"host": 1.0})
    # Two rounds of the two sockets.
    assert slow.simulate("all_reduce", "parts", 64).time_s == pytest.approx(2, rel=1e-3)
    assert host.topology(link_bytes_per_s={"socket": 7e9}).levels[-1].link_bytes_per_s == 7e9


@pytest.mark.pure
def test_rounds_cross_the_domains_of_their_level(hosts):
    host = hosts["epyc nps4"]
    schedule.register_levels("domains", host.sizes)
    moves = schedule.build("all_reduce", "domains", len(host.cores)).moves
    messages = [(move.round, move.src, move.dst) for move in moves]
    rounds = crossing.domains_of_rounds(messages, host.cores, host)
    names = ["l3", "numa", "socket", "host"]
    assert list(rounds.values()) == [*names, *reversed(names)]
    # Ranks 0 and 1 on another host: messages between these two do not count.
    elsewhere = [None, None, *host.cores[2:]]
    rounds = crossing.domains_of_rounds([(0, 0, 1), (0, 2, 3), (1, 1, 2)], elsewhere, host)
    assert rounds == {0: "l3", 1: "network"}
    assert crossing.domains_of_rounds([(0, 0, 1)], [(0, 1), (0,)], host) == {0: "l3"}
    assert crossing.domains_of_rounds([(0, 0, 1)], [(0,), (0,)], host) == {0: "core"}


def pinned(comm):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank]})
    comm.barrier()
    text = comm.explain("broadcast", 64)
    comm.barrier()
    return text


def free(comm):
    text = comm.explain("all_reduce", 64)
    comm.barrier()
    return text


@pytest.mark.ranks
def test_explain_names_the_domain_of_each_round(tmp_path, monkeypatch):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs to pin two ranks")
    # Two sockets, of which the second one has the second rank's CPU and one more.
    num_cpus = cpus[1] + 3
    for cpu in range(num_cpus):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{int(cpu in (cpus[1], num_cpus - 1))}\n")
    monkeypatch.setattr(sysfs, "ROOT", tmp_path)
    for text in pycoll.run_ranks(pinned, 2):
        assert text.splitlines()[-1] == "  domains: round 0 inside host"
    for text in pycoll.run_ranks(free, 2, threads=True):
        assert "not known: the ranks may run in every socket: pin them to CPUs" in text


@pytest.mark.ranks
def test_explain_on_a_host_of_one_domain_says_so(tmp_path, monkeypatch):
    num_cpus = max(os.sched_getaffinity(0)) + 1
    server = Server(
        sockets=1, nodes=1, cores=num_cpus, cores_per_l3=num_cpus, threads=1, distances=(10,)
    )
    monkeypatch.setattr(sysfs, "ROOT", write(tmp_path, server))
    for text in pycoll.run_ranks(free, 2, threads=True):
        assert "the ranks' CPUs are in one domain (l3, numa, socket, host)" in text
    assert "domains" not in pycoll.run_ranks(free, 1, threads=True)[0]
    monkeypatch.setattr(sysfs, "ROOT", tmp_path / "nowhere")
    assert "domains: not known: " in pycoll.run_ranks(free, 2, threads=True)[0]
