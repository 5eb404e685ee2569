"""Times between hosts: beside the simulator and iperf3, and with and without TLS."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time

import numpy as np
import pytest
from delayed import throttled
from namespaces import Network, values

import pycoll
from pycoll import topology

pytestmark = [pytest.mark.ranks, pytest.mark.timing, pytest.mark.timeout(300)]

Comm = pycoll.Communicator
NBYTES = 16 << 20
ROUNDS = 5


def ping_pong_s(comm: Comm, peers: tuple[int, int], nbytes: int) -> float:
    """One way of a message between two ranks, back to back so that no burst is saved up."""
    x = np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(ROUNDS):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(4):
            if comm.rank == peers[0]:
                comm.send(x, peers[1])
                comm.recv(x, peers[1])
            elif comm.rank == peers[1]:
                comm.recv(x, peers[0])
                comm.send(x, peers[0])
        times.append((time.perf_counter() - start) / 8)
    return float(comm.all_reduce(np.array([min(times)]), "max")[0])


def measured(comm: Comm, per_host: int) -> dict[str, float]:
    """Costs of messages inside a host and between two, and times of two algorithms, in seconds."""
    facts = {}
    for name, peers in (("inside", (0, 1)), ("between", (0, per_host))):
        small, large = (ping_pong_s(comm, peers, nbytes) for nbytes in (8, 4 << 20))
        facts[f"{name} alpha"], facts[f"{name} beta"] = small, (large - small) / (4 << 20)
    x = np.zeros(NBYTES // 4, np.float32)
    for algorithm in ("ring", "hierarchical"):
        comm.all_reduce(x, algorithm=f"{algorithm}/simple")
        times = []
        for _ in range(ROUNDS):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(2):
                comm.all_reduce(x, algorithm=f"{algorithm}/simple")
            times.append((time.perf_counter() - start) / 2)
        facts[algorithm] = float(comm.all_reduce(np.array([np.median(times)]), "max")[0])
    return facts


def predicted(facts: dict[str, float], hosts: int, per_host: int) -> dict[str, float]:
    cluster = topology.loads(f"""
[[level]]
name = "host"
size = {per_host}
link_gb_per_s = {1e-9 / facts["inside beta"]}
latency_us = {1e6 * facts["inside alpha"]}
carries_outside = false

[[level]]
name = "cluster"
size = {hosts}
link_gb_per_s = {1e-9 / facts["between beta"]}
latency_us = {1e6 * facts["between alpha"]}
""")
    return {
        name: cluster.simulate("all_reduce", name, NBYTES).time_s
        for name in ("ring", "hierarchical")
    }


@pytest.mark.parametrize(
    ("num_hosts", "delay_s"),
    [(2, 0.0), (2, 0.5e-3), (4, 0.0), (4, 0.5e-3)],
    ids=["2", "2-0.5ms", "4", "4-0.5ms"],
)
def test_simulation_predicts_what_throttled_hosts_take(num_hosts, delay_s):
    wrong = ""
    with throttled(num_hosts, delay_s) as network:
        for _ in range(3):  # what else runs on the machine is not in the model
            facts = network.run(measured, 2, 2, timeout_s="60")[0].get()
            if not (wrong := difference(facts, predicted(facts, num_hosts, 2))):
                break
    assert not wrong, wrong


def difference(facts: dict[str, float], model: dict[str, float]) -> str:
    """The first time that is not within 15 % of the prediction, or a ratio not within 20 %."""
    print({name: f"{seconds:.3g}" for name, seconds in facts.items()}, model)
    for name, seconds in model.items():
        if facts[name] != pytest.approx(seconds, rel=0.15):
            return f"{name} took {facts[name]:.4f} s, predicted were {seconds:.4f} s"
    gain, model_gain = (of["ring"] / of["hierarchical"] for of in (facts, model))
    if gain < 1.05 or gain != pytest.approx(model_gain, rel=0.2):
        return f"hierarchical is {gain:.2f} times as fast, predicted were {model_gain:.2f}"
    return ""


@pytest.mark.skipif(not shutil.which("iperf3"), reason="the comparison is with iperf3")
def test_one_link_carries_as_much_as_iperf3(two: Network):
    """Two hosts at 10 Gbit/s: at least 80 % of what one stream of iperf3 gets."""

    def gbit_per_s(comm: Comm) -> float:
        x = np.zeros(16 << 20, np.uint8)
        times = []
        for _ in range(5):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(3):
                comm.broadcast(x)
            comm.barrier()
            times.append((time.perf_counter() - start) / 3)
        return 8e-9 * x.nbytes / min(times)

    two.set_rate("10gbit")
    try:
        server = two.command(0, ["iperf3", "-s", "-1", "-B", two.address(0)])
        time.sleep(0.5)
        text = two.command(1, ["iperf3", "-c", two.address(0), "-t", "2", "-J"]).communicate()[0]
        server.communicate()
        iperf3 = json.loads(text)["end"]["sum_received"]["bits_per_second"] * 1e-9
        ours = two.run(gbit_per_s)[0].get()
    finally:
        two.set_rate(None)
    print(f"iperf3 {iperf3:.2f}, pycoll {ours:.2f} Gbit/s")
    assert ours > 0.8 * iperf3


def both(comms: dict[str, Comm], nbytes: int, samples: int) -> dict[str, float]:
    """Median seconds of an all_reduce with each communicator, sample after sample in turn."""
    x = np.ones(nbytes // 4, np.float32)
    calls = 5 if nbytes <= 1 << 16 else 1
    times: dict[str, list[float]] = {name: [] for name in comms}
    for _ in range(samples):
        for name, comm in comms.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                comm.all_reduce(x, "max", out=x)
            comm.barrier()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: float(np.median(all_times)) for name, all_times in times.items()}


def test_encryption_costs_nothing_that_a_network_of_one_gbit_shows(two):
    """The table of docs/hosts.md: without a throttle, and at 1 Gbit/s."""

    def main() -> dict[int, dict[str, float]]:
        comms = {}
        for name, on, port in ("plain", "0", "20990"), ("tls", "1", "20991"):
            os.environ |= {"PYCOLL_TLS": on, "MASTER_PORT": port}
            comms[name] = pycoll.init(timeout_s=30)
        return {n: both(comms, n, 15) for n in (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)}

    for rate in (None, "1gbit"):
        two.set_rate(rate)
        try:
            measured = values(two.outcomes(two.start_world(main, [0, 1])))[0]
        finally:
            two.set_rate(None)
        for nbytes, s in measured.items():
            print(rate, nbytes, *(f"{name} {1e6 * s[name]:.0f} us" for name in s))
    assert measured[16 << 20]["tls"] < 1.1 * measured[16 << 20]["plain"]


SLOT_BYTES = 128 << 10  # a payload that one slot takes is one message a hop, in both rings


def rings_s(comm: Comm) -> dict[str, float]:
    """Seconds of an all_reduce of one slot around the naive and around the chunked ring."""
    times = dict[str, float]()
    for name in ("ring", "ring_naive"):
        rounds = []
        for _ in range(3):
            x = np.ones(SLOT_BYTES // 4, np.float32)
            comm.barrier()
            start = time.perf_counter()
            total = comm.all_reduce(x, algorithm=f"{name}/simple")
            taken = time.perf_counter() - start
            assert (total == comm.size).all()
            rounds.append(float(comm.all_reduce(np.array([taken]), "max")[0]))
        times[name] = min(rounds)
    return times


def test_naive_ring_takes_m_times_as_long_as_the_chunked_ring():
    """30 seconds: links of 1 MB/s, so slow that little else counts, and almost without a burst."""
    ratios = {}
    for m in (2, 4, 8):
        with contextlib.closing(Network(m)) as network:
            network.set_rate("8mbit", burst="10kb")
            times = network.run(rings_s, timeout_s="60")[0].get()
        ratios[m] = times["ring_naive"] / times["ring"]
        print(m, times, ratios[m])
    assert ratios == {m: pytest.approx(m, rel=0.1) for m in ratios}
