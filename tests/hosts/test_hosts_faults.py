"""Repeated faults: the right error or the right result within the bound, and nothing left.

Two hosts with two ranks each. The remaining ranks go on in a new world, newcomers take the places
of killed ranks, and the ranks that live through all of it count their memory. The slow tests
repeat each fault a few times, `make soak` twenty times.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import unauthenticated
from delayed import DelayedNetwork
from host_jobs import one_case
from namespaces import TOKEN, free_port, values
from processes import wait_for_pids

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

Comm = pycoll.Communicator
SILENCE_S = 1.0
WARM = 1  # after this turn the memory is counted first
few_and_many = pytest.mark.parametrize(
    "times", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.soak)]
)


def resources() -> tuple[int, int, float]:
    """Open descriptors, threads, and MiB of memory of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    fds, tasks = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return fds, tasks, rss_kib / 1024


def back_to_normal(before: tuple[int, int, float]) -> None:
    """Threads may take a moment to go."""
    end = time.monotonic() + 5
    now = resources()
    while (now[0] > before[0] or now[1] > before[1]) and time.monotonic() < end:
        time.sleep(0.05)
        now = resources()
    assert now[0] <= before[0] and now[1] <= before[1], (before, now)
    assert now[2] < before[2] + 16, (before, now)


def until_error(comm: Comm) -> float:
    """Seconds of the last call, which fails because a rank died."""
    x = np.ones(5000, np.float32)
    while True:
        start = time.monotonic()
        try:
            comm.all_reduce(x, "max")
        except pycoll.PeerDiedError:
            return time.monotonic() - start


@few_and_many
@pytest.mark.parametrize("num_killed", [1, 2])
def test_rank_or_host_that_is_killed_is_replaced_and_all_go_on(two, num_killed, times, tmp_path):
    """Host 1 loses one or both of its ranks in each turn; host 0 lives through it."""
    where = f"{two.address(0)}:{free_port()}"

    def victim(comm: Comm, i: int) -> None:
        (tmp_path / f"{i}.rank{comm.rank}").write_text(str(os.getpid()))
        until_error(comm)  # does not return

    def newcomer() -> None:
        comm = pycoll.join(where, timeout_s=20)
        step = int(comm.broadcast(np.zeros(1), root=0)[0])
        follow(comm, step)

    def follow(comm: Comm, step: int) -> int:
        before = None
        for i in range(step, times):
            total = comm.all_reduce(np.full(1000, 1.0 + comm.rank))
            assert total[0] == total[-1] == 10, total
            if comm.rank >= 4 - num_killed:
                victim(comm, i)
            assert until_error(comm) < 2 * SILENCE_S + 15
            comm = comm.shrink(20)
            assert comm.former_ranks == list(range(4 - num_killed))
            comm = comm.grow(num_killed, where, timeout_s=20)
            comm.broadcast(np.full(1, i + 1.0), root=0)
            if i == WARM:
                before = resources()
        assert before is not None
        back_to_normal(before)
        (tmp_path / f"done{comm.rank}").write_text("")
        time.sleep(0.2)
        comm.close()
        return times

    env = {"PYCOLL_SILENCE_S": str(SILENCE_S), "timeout_s": "30"}
    pids = two.start_ranks(follow, 2, 0, **env)
    newcomers = []
    for i in range(times):
        killed = [wait_for_pid(tmp_path / f"{i}.rank{3 - k}") for k in range(num_killed)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        silence = {"PYCOLL_SILENCE_S": str(SILENCE_S), "PYCOLL_TOKEN": TOKEN}
        newcomers += [two.start(1, newcomer, **silence) for _ in range(num_killed)]
    for pid in pids[: 4 - num_killed]:
        assert two.outcome(pid, timeout_s=200).get() == times
    two.outcomes(pids[4 - num_killed :] + newcomers)


def wait_for_pid(path: Path) -> int:
    end = time.monotonic() + 60
    while not (path.exists() and (text := path.read_text())):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)
    return int(text)


@few_and_many
def test_cable_that_is_pulled_leaves_one_host_that_goes_on(two, times, tmp_path):
    def go_on(comm: Comm, folder: Path) -> tuple[float, list[int], float]:
        (folder / f"rank{comm.rank}").write_text(str(os.getpid()))
        took_s = until_error(comm)
        with comm.shrink(20) as new:
            total = float(new.all_reduce(np.full(1000, 1.0 + new.former_ranks[new.rank]))[-1])
            former = new.former_ranks
            new.barrier()
        return took_s, former, total

    for i in range(times):
        folder = tmp_path / str(i)
        folder.mkdir()
        env = {"PYCOLL_SILENCE_S": str(SILENCE_S)}
        pids = two.start_ranks(go_on, 2, folder, **env)
        wait_for_pids(folder, 4)
        two.set_link(i % 2, False)
        try:
            outcomes = two.outcomes(pids)
        finally:
            two.set_link(i % 2, True)
        for outcome in outcomes[:2]:
            took_s, former, total = outcome.get()
            assert took_s < SILENCE_S + 15 and former == [0, 1] and total == 3
            assert outcome.fds_leaked <= 1
        for outcome in outcomes[2:]:
            assert outcome.error == "PeerDiedError", outcome
            assert "ranks 0, 1 may go on elsewhere" in outcome.text


def many_collectives(comm: Comm, rounds: int) -> None:
    before = None
    for i in range(rounds):
        for name in ("all_reduce", "all_to_all", "broadcast", "reduce_scatter"):
            one_case(comm, name, (1, 3000)[i % 2], 0, "")
        if i == WARM:
            before = resources()
    assert before is not None
    back_to_normal(before)


@pytest.mark.slow
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.skipif(
    not shutil.which("nft", path=os.environ["PATH"] + ":/usr/sbin"),
    reason="dropping packets needs nftables (nft)",
)
def test_loss_of_five_percent_only_slows_things_down(two, times):
    two.set_loss(5)
    try:
        values(two.run(many_collectives, 2, times, PYCOLL_SILENCE_S="4", timeout_s="60"))
    finally:
        two.set_loss(0)


@pytest.mark.parametrize(
    ("times", "delay_s"),
    [
        pytest.param(2, 0.02, marks=pytest.mark.slow),
        pytest.param(2, 0.2, marks=pytest.mark.slow),
        pytest.param(20, 0.2, marks=pytest.mark.soak),
    ],
)
def test_delay_only_slows_things_down(delayed: DelayedNetwork, times, delay_s):
    delayed.set_delay(delay_s)
    env = {"PYCOLL_SILENCE_S": str(SILENCE_S), "timeout_s": "60"}
    outcomes = delayed.outcomes(delayed.start_ranks(many_collectives, 1, times, **env), 200)
    values(outcomes)
    assert min(one.seconds for one in outcomes) > 2 * times * delay_s


@few_and_many
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_ranks_join_in_every_order_while_unauthenticated_peers_connect(two, times, tls):
    """The same processes join several times, in other orders each time."""
    ports = [str(free_port()) for _ in range(times)]

    def main() -> int:
        rank = int(os.environ["RANK"])
        before = None
        for i in range(times):
            os.environ["MASTER_PORT"] = ports[i]
            time.sleep(0.3 * ((rank * (2 * i + 1) + i) % 4))
            with pycoll.init(timeout_s=30) as comm:
                total = comm.all_reduce(np.full(3000, 1.0 + comm.rank))
                assert total[0] == total[-1] == 10
            if i == WARM:
                before = resources()
        assert before is not None
        back_to_normal(before)
        return times

    env = {"PYCOLL_TLS": str(int(tls))}
    kinds = unauthenticated.TLS_KINDS if tls else unauthenticated.KINDS
    attackers = unauthenticated.start(two, kinds, 0.6 * times, **env)
    pids = two.start_world(main, [0, 1, 0, 1], **env)
    assert values(two.outcomes(pids, timeout_s=120)) == [times] * 4
    assert min(values(two.outcomes(attackers))) >= 1
