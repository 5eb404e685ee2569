"""Every fault twenty times: the right error or the right result within the bound, nothing left.

Two hosts with two ranks each. The ranks that are left go on in a new world, newcomers take the
places of those that are gone, and the ones that live through all of it count their memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from delayed import DelayedNetwork
from namespaces import free_port
from processes import wait_for_pids
from test_hosts_collectives import one_case

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(290)]

Comm = pycoll.Communicator
TIMES = 20
SILENCE_S = 1.0


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
    while (now := resources())[:2] > before[:2] and time.monotonic() < end:
        time.sleep(0.05)
    assert now[0] <= before[0] and now[1] <= before[1], (before, now)
    assert now[2] < before[2] + 16, (before, now)


def until_error(comm: Comm) -> float:
    """Seconds of the last call, which fails for the death of a rank."""
    x = np.ones(5000, np.float32)
    while True:
        start = time.monotonic()
        try:
            comm.all_reduce(x, "max")
        except pycoll.PeerDiedError:
            return time.monotonic() - start


@pytest.mark.parametrize("num_killed", [1, 2])
def test_rank_or_host_that_is_killed_is_replaced_and_all_go_on(two, num_killed, tmp_path):
    """Host 1 loses one or both of its ranks, again and again; host 0 lives through it."""
    where = f"{two.address(0)}:{free_port()}"

    def victim(comm: Comm, i: int) -> None:
        (tmp_path / f"{i}.rank{comm.rank}").write_text(str(os.getpid()))
        until_error(comm)  # never comes back from it

    def newcomer() -> None:
        comm = pycoll.join(where, timeout_s=20)
        step = int(comm.broadcast(np.zeros(1), root=0)[0])
        follow(comm, step)

    def follow(comm: Comm, step: int) -> int:
        before = None
        for i in range(step, TIMES):
            total = comm.all_reduce(np.full(1000, 1.0 + comm.rank))
            assert total[0] == total[-1] == 10, total
            if comm.rank >= 4 - num_killed:
                victim(comm, i)
            assert until_error(comm) < 2 * SILENCE_S + 3
            comm = comm.shrink(10)
            assert comm.former_ranks == list(range(4 - num_killed))
            comm = comm.grow(num_killed, where, timeout_s=20)
            comm.broadcast(np.full(1, i + 1.0), root=0)
            if i == 2:
                before = resources()
        assert before is not None
        back_to_normal(before)
        (tmp_path / f"done{comm.rank}").write_text("")
        time.sleep(0.2)
        comm.close()
        return TIMES

    env = {"PYCOLL_SILENCE_S": str(SILENCE_S), "timeout_s": "30"}
    pids = two.start_ranks(follow, 2, 0, **env)
    newcomers = []
    for i in range(TIMES):
        killed = [wait_for_pid(tmp_path / f"{i}.rank{3 - k}") for k in range(num_killed)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        silence = {"PYCOLL_SILENCE_S": str(SILENCE_S), "PYCOLL_TOKEN": "of a test"}
        newcomers += [two.start(1, newcomer, **silence) for _ in range(num_killed)]
    for pid in pids[: 4 - num_killed]:
        assert two.outcome(pid, timeout_s=120).get() == TIMES
    for pid in pids[4 - num_killed :] + newcomers:
        two.outcome(pid)


def wait_for_pid(path: Path) -> int:
    end = time.monotonic() + 60
    while not (path.exists() and (text := path.read_text())):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)
    return int(text)


def test_cable_that_is_pulled_leaves_one_host_that_goes_on(two, tmp_path):
    def go_on(comm: Comm, folder: Path) -> tuple[float, list[int], float]:
        (folder / f"rank{comm.rank}").write_text(str(os.getpid()))
        took_s = until_error(comm)
        with comm.shrink(10) as new:
            total = float(new.all_reduce(np.full(1000, 1.0 + new.former_ranks[new.rank]))[-1])
            former = new.former_ranks
            new.barrier()
        return took_s, former, total

    for i in range(TIMES):
        folder = tmp_path / str(i)
        folder.mkdir()
        env = {"PYCOLL_SILENCE_S": str(SILENCE_S)}
        pids = two.start_ranks(go_on, 2, folder, **env)
        wait_for_pids(folder, 4)
        two.set_link(i % 2, False)
        try:
            outcomes = [two.outcome(pid) for pid in pids]
        finally:
            two.set_link(i % 2, True)
        for outcome in outcomes[:2]:
            took_s, former, total = outcome.get()
            assert took_s < SILENCE_S + 3 and former == [0, 1] and total == 3
            assert outcome.fds_leaked <= 1
        for outcome in outcomes[2:]:
            assert outcome.error == "PeerDiedError", outcome
            assert "ranks 0, 1 may go on elsewhere" in outcome.text


def many_collectives(comm: Comm, rounds: int) -> None:
    before = None
    for i in range(rounds):
        for name in ("all_reduce", "all_to_all", "broadcast", "reduce_scatter"):
            one_case(comm, name, (1, 3000)[i % 2], 0, "")
        if i == 2:
            before = resources()
    assert before is not None
    back_to_normal(before)


@pytest.mark.skipif(
    not shutil.which("nft", path=os.environ["PATH"] + ":/usr/sbin"),
    reason="dropping packets needs nftables (nft)",
)
def test_loss_of_five_percent_only_slows_things_down(two):
    two.set_loss(5)
    try:
        outcomes = two.run(many_collectives, 2, TIMES, PYCOLL_SILENCE_S="4", timeout_s="60")
    finally:
        two.set_loss(0)
    for outcome in outcomes:
        outcome.get()


def test_delay_of_200_ms_only_slows_things_down(delayed: DelayedNetwork):
    delayed.set_delay(0.2)
    env = {"PYCOLL_SILENCE_S": str(SILENCE_S), "timeout_s": "60"}
    pids = delayed.start_ranks(many_collectives, 1, TIMES, **env)
    for pid in pids:
        delayed.outcome(pid, timeout_s=200).get()


def test_ranks_join_in_every_order_and_strangers_do_no_harm(two):
    """One set of processes joins again and again, in other orders, while a stranger knocks."""

    def stranger(kind: int, seconds: float) -> int:
        kept, knocks = [], 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for port in listening_ports():
                try:
                    s = socket.create_connection((two.address(0), port), timeout=0.2)
                except OSError:
                    continue
                knocks += 1
                with contextlib.suppress(ConnectionError):  # it was gone again
                    if kind == 1:
                        s.sendall(os.urandom(5000))
                    elif kind == 2:
                        s.sendall(b"pycoll 1" + (1).to_bytes(4, "little") + bytes(52))
                    elif kind == 3:
                        s.sendall(b"p")
                if kind == 3:
                    kept.append(s)  # slow: neither speaks nor goes
                else:
                    s.close()
            time.sleep(0.02)
        return knocks

    def main() -> int:
        rank = int(os.environ["RANK"])
        before = None
        for i in range(TIMES):
            os.environ["MASTER_PORT"] = str(26000 + i)
            time.sleep(0.1 * ((rank * (2 * i + 1) + i) % 4))
            with pycoll.init(timeout_s=20) as comm:
                total = comm.all_reduce(np.full(3000, 1.0 + comm.rank))
                assert total[0] == total[-1] == 10
            if i == 2:
                before = resources()
        assert before is not None
        back_to_normal(before)
        return TIMES

    attackers = [two.start(0, lambda kind=kind: stranger(kind, 12)) for kind in range(4)]
    env = {"WORLD_SIZE": "4", "MASTER_ADDR": two.address(0), "PYCOLL_TOKEN": "right"}
    pids = [two.start(rank % 2, main, RANK=str(rank), **env) for rank in range(4)]
    for pid in pids:
        assert two.outcome(pid, timeout_s=120).get() == TIMES
    assert all(two.outcome(pid).get() > 20 for pid in attackers)


def listening_ports() -> list[int]:
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    words = [line.split() for line in lines]
    return [int(w[1].split(":")[1], 16) for w in words if w[3] == "0A"]
