"""Networks that lose or delay packets only slow things down."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest
from delayed import DelayedNetwork
from host_jobs import one_case
from namespaces import Network, values

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator


def some_collectives(comm: Comm, rows: int, rounds: int) -> float:
    start = time.monotonic()
    for _ in range(rounds):
        for name in ("all_reduce", "all_to_all", "broadcast"):
            one_case(comm, name, rows, 0, "")
    return time.monotonic() - start


@pytest.mark.skipif(
    not shutil.which("nft", path=os.environ["PATH"] + ":/usr/sbin"),
    reason="dropping packets needs nftables (nft)",
)
def test_five_percent_of_loss_only_slow_things_down(two: Network):
    two.set_loss(5)
    try:
        values(two.run(some_collectives, 2, 3000, 4, PYCOLL_SILENCE_S="4", timeout_s="60"))
    finally:
        two.set_loss(0)


def test_delay_only_slows_things_down(delayed: DelayedNetwork):
    delayed.set_delay(0.05)
    env = {"PYCOLL_SILENCE_S": "1.5", "timeout_s": "60"}
    assert min(values(delayed.run(some_collectives, 1, 3000, 1, **env))) > 0.1


@pytest.mark.timing
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
