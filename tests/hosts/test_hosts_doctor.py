"""`pycoll doctor` where a job has ranks on several hosts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from namespaces import Network, launcher_script

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

LATE = 3  # on the second host


def oversleep() -> None:
    time.sleep(100)


def work(comm: pycoll.Communicator) -> None:
    comm.barrier()
    if comm.rank == LATE:
        oversleep()
    comm.all_reduce(np.ones(7, np.float32))


@pytest.fixture(scope="module")
def job(networks) -> Iterator[tuple[Network, str]]:
    """Two ranks on each of two hosts, of which the last sleeps; and the process of rank 0."""
    network: Network = networks(2)
    pids = network.start_ranks(work, 2, timeout_s="100")
    yield network, str(pids[0])
    for pid in pids:
        network.kill(pid)


def doctor(network: Network, pid: str, hosts: str) -> str:
    launcher = launcher_script(network)
    command = [sys.executable, "-m", "pycoll", "doctor", "--late", "0.2", pid]
    own = {"PYCOLL_SSH": str(launcher), "COLUMNS": "200", "NO_COLOR": "1"}
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until the others wait
            text, _ = network.command(0, [*command, "--hosts", hosts], **own).communicate()
            if "late: rank" in text:
                return text
            time.sleep(0.2)
        raise AssertionError(text)
    finally:
        launcher.unlink()


def test_doctor_names_the_late_rank_its_host_and_where_it_is(job: tuple[Network, str]):
    network, pid = job
    here, there = network.address(0), network.address(1)
    text = doctor(network, pid, f"{here},{there}")
    assert f"late: rank {LATE} on host {there}" in text, text
    rows = [line for line in text.splitlines() if re.search(r"10\.77\.0\.\d\b.*#", line)]
    found = [re.findall(r"10\.77\.0\.\d", row)[0] for row in rows]
    assert found == [here] * 2 + [there] * 2, text
    assert text.count("waiting") == 3 and "oversleep" in text, text
    assert text.count("Python stacks of rank") == 1, text


def test_doctor_goes_on_without_a_host_that_does_not_answer(job: tuple[Network, str]):
    network, pid = job
    text = doctor(network, pid, f"{network.address(0)},10.77.0.77")
    assert "host 10.77.0.77: " in text and f"late: rank {LATE}" in text, text
