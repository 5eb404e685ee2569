"""Worlds of several hosts that go on without a rank, a host or a cable."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from host_jobs import plain_and_tls
from namespaces import TOKEN, Network, Outcome, free_port, values
from processes import wait_for_pids

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator
SILENCE_S = 1.5


def until_error_and_on(comm: Comm, folder: Path) -> tuple[list[int], list[float]]:
    """Reduces until something fails, agrees, shrinks, and gathers the old ranks."""
    former = comm.rank
    with pytest.raises(pycoll.PeerDiedError):
        for i in range(10_000_000):
            comm.all_reduce(np.ones(100, np.float32), "max")
            if i == 20:
                (folder / f"rank{comm.rank}").write_text(str(os.getpid()))
    highest = comm.agree(former, "max", timeout_s=20)
    with comm.shrink(20) as new:
        assert highest == new.former_ranks[-1]
        gathered = new.all_gather(np.array([float(former)])).ravel().tolist()
        time.sleep(0.5)  # hosts whose worlds end at once would be taken for dead
        return new.former_ranks, gathered


def start_loop(network: Network, per_host: int, folder: Path, **env: str) -> list[int]:
    env["PYCOLL_SILENCE_S"] = str(SILENCE_S)
    pids = network.start_ranks(until_error_and_on, per_host, folder, **env)
    wait_for_pids(folder, len(pids))
    return pids


def went_on(outcomes: list[Outcome], ranks: list[int]) -> None:
    assert values(outcomes) == [(ranks, [float(rank) for rank in ranks])] * len(ranks)


@plain_and_tls
@pytest.mark.parametrize("victim", [0, 3])
def test_killed_rank_of_two_hosts_leaves_the_three_others(two, victim, links, tmp_path):
    pids = start_loop(two, 2, tmp_path, **links)
    os.kill(pids[victim], signal.SIGKILL)
    outcomes = two.outcomes(pids)
    went_on(outcomes[:victim] + outcomes[victim + 1 :], sorted({0, 1, 2, 3} - {victim}))


def test_killed_host_leaves_the_other(two, tmp_path):
    pids = start_loop(two, 2, tmp_path)
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    outcomes = two.outcomes(pids)
    # Ranks 2 and 3 know from the dead processes' own kernel that these have ended.
    went_on(outcomes[2:], [2, 3])


def outcomes_without_cable(network: Network, host: int, pids: list[int]) -> list[Outcome]:
    network.set_link(host, False)
    try:
        return network.outcomes(pids)
    finally:
        network.set_link(host, True)


@pytest.mark.slow
def test_cable_between_two_hosts_leaves_the_one_with_rank_0(two, tmp_path):
    outcomes = outcomes_without_cable(two, 0, start_loop(two, 2, tmp_path))
    went_on(outcomes[:2], [0, 1])
    for outcome in outcomes[2:]:
        assert outcome.error == "PeerDiedError", outcome
        assert "only ranks 2, 3 of 4 came; ranks 0, 1 may go on elsewhere" in outcome.text


@pytest.mark.slow
def test_cable_of_one_of_four_hosts_leaves_the_three_others(four, tmp_path):
    outcomes = outcomes_without_cable(four, 0, start_loop(four, 1, tmp_path))
    assert "only rank 0 of 4 came" in outcomes[0].text, outcomes[0]
    went_on(outcomes[1:], [1, 2, 3])


def test_newcomer_of_another_host_joins(two):
    where = f"{two.address(0)}:{free_port()}"

    def world(comm: Comm) -> list[float]:
        with comm.grow(1, where, timeout_s=20) as new:
            return new.all_gather(np.array([float(new.rank)])).ravel().tolist()

    def newcomer() -> list[float]:
        with pycoll.join(where, timeout_s=20) as new:
            return new.all_gather(np.array([float(new.rank)])).ravel().tolist()

    pids = two.start_ranks(world, 1)
    pids.append(two.start(1, newcomer, PYCOLL_TOKEN=TOKEN))
    assert values(two.outcomes(pids)) == [[0.0, 1.0, 2.0]] * 3
