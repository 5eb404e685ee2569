"""What the simulator predicts for throttled hosts, and what they take."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from delayed import DelayedNetwork, why_not_delayed
from namespaces import Network

import pycoll
from pycoll import topology

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timing,
    pytest.mark.timeout(170),
]

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


@contextlib.contextmanager
def throttled(request: pytest.FixtureRequest, num_hosts: int, delay_s: float) -> Iterator[Network]:
    """Hosts at 1 Gbit/s whose packets are under way for so long."""
    if delay_s != 0:
        if why := why_not_delayed():
            pytest.skip(why)
        delayed = DelayedNetwork(num_hosts, name=f"pyc{os.getpid()}p")
        delayed.set_delay(delay_s)
        delayed.set_rate("1gbit")
        with contextlib.closing(delayed):
            yield delayed
        return
    network = request.getfixturevalue({2: "two", 4: "four"}[num_hosts])
    network.set_rate("1gbit")
    try:
        yield network
    finally:
        network.set_rate(None)


@pytest.mark.parametrize(
    ("num_hosts", "delay_s"),
    [(2, 0.0), (2, 0.5e-3), (4, 0.0), (4, 0.5e-3)],
    ids=["2", "2-0.5ms", "4", "4-0.5ms"],
)
def test_simulation_predicts_what_throttled_hosts_take(request, num_hosts, delay_s):
    wrong = ""
    with throttled(request, num_hosts, delay_s) as network:
        for _ in range(3):  # what else runs on the machine is not in the model
            facts = network.run(measured, 2, 2, timeout_s="60")[0].get()
            if not (wrong := difference(facts, predicted(facts, num_hosts, 2))):
                break
    assert not wrong, wrong


def difference(facts: dict[str, float], model: dict[str, float]) -> str:
    """What is not within 15 % of the prediction, or 20 % for the ratio of the two; else empty."""
    print({name: f"{seconds:.3g}" for name, seconds in facts.items()}, model)
    for name, seconds in model.items():
        if facts[name] != pytest.approx(seconds, rel=0.15):
            return f"{name} took {facts[name]:.4f} s, predicted were {seconds:.4f} s"
    gain, model_gain = (of["ring"] / of["hierarchical"] for of in (facts, model))
    if gain < 1.05 or gain != pytest.approx(model_gain, rel=0.2):
        return f"hierarchical is {gain:.2f} times as fast, predicted were {model_gain:.2f}"
    return ""
