"""Ranks of other hosts that die, stop, leave or make other calls; unauthenticated peers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import unauthenticated
from host_jobs import plain_and_tls
from namespaces import Network, free_port, values
from processes import wait_for_pids

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator
SILENCE_S = 1.5


def loop(comm: Comm, folder: Path, count: int) -> None:
    x = np.ones(count, np.float32)
    for i in range(1_000_000):
        comm.all_reduce(x, "max")
        if i == 20:
            (folder / f"rank{comm.rank}").write_text(str(os.getpid()))


def start_loop(
    network: Network, per_host: int, folder: Path, count: int, silence_s: float, **env: str
) -> list[int]:
    """Starts ranks that reduce until they fail; returns when all do."""
    env["PYCOLL_SILENCE_S"] = str(silence_s)
    pids = network.start_ranks(loop, per_host, folder, count, **env)
    wait_for_pids(folder, len(pids))
    return pids


def test_abort_reaches_the_other_host_with_its_reason(two):
    def work(comm: Comm) -> str:
        comm.barrier()
        if comm.rank == 0:
            comm.abort("the loss is nan")
        with pytest.raises(pycoll.AbortedError) as raised:
            comm.barrier()
        return str(raised.value)

    for text in values(two.outcomes(two.start_ranks(work, 1))):
        assert text.endswith("rank 0 aborted the communicator: the loss is nan")


@plain_and_tls
@pytest.mark.parametrize(("per_host", "count"), [(1, 1), (2, 100_000)])
def test_killed_rank_of_another_host_is_named_by_all(two, count, per_host, links, tmp_path):
    pids = start_loop(two, per_host, tmp_path, count, silence_s=30, **links)
    os.kill(pids[-1], signal.SIGKILL)
    killed_at = time.monotonic()
    others = two.outcomes(pids[:-1])
    assert time.monotonic() - killed_at < 15  # it is not the silence that names the rank
    for outcome in others:
        assert (outcome.error, outcome.rank) == ("PeerDiedError", len(pids) - 1), outcome.text
        assert outcome.fds_leaked <= 1
    assert "on host host1 ended: its connection is gone" in others[0].text or per_host == 2
    assert two.outcome(pids[-1]).ended == signal.SIGKILL


@plain_and_tls
@pytest.mark.parametrize("how", ["cable", "stopped"])
def test_silent_host_is_named_within_the_bound(two, how, links, tmp_path):
    pids = start_loop(two, 1, tmp_path, 1000, SILENCE_S, **links)
    if how == "cable":
        two.set_link(1, False)
    else:
        os.kill(pids[1], signal.SIGSTOP)
    fell_silent = time.monotonic()
    try:
        outcome = two.outcome(pids[0])
        took_s = time.monotonic() - fell_silent
        other = two.outcome(pids[1]) if how == "cable" else None
    finally:
        two.set_link(1, True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGCONT)
    assert (outcome.error, outcome.rank) == ("PeerDiedError", 1), outcome.text
    assert "rank 1 on host host1 has not been heard of for 1.5 s" in outcome.text
    assert SILENCE_S * 0.6 < took_s < SILENCE_S + 15  # most of it for a loaded machine
    if other is not None:
        assert (other.error, other.rank) == ("PeerDiedError", 0), other.text
    else:
        # It was stopped, and continues with a communicator that is broken.
        assert two.outcome(pids[1]).error in ("PeerDiedError", "AbortedError")


@pytest.mark.slow
def test_short_outage_only_slows_things_down(two):
    def job(comm: Comm) -> int:
        x = np.ones(1000)
        end = time.monotonic() + 1.5
        done = 0
        while comm.all_reduce(np.array([time.monotonic() < end]), "min")[0]:
            comm.all_reduce(x.copy())
            done += 1
        return done

    pids = two.start_ranks(job, 1)
    time.sleep(0.7)
    two.set_link(1, False)
    time.sleep(0.5)
    two.set_link(1, True)
    assert min(values(two.outcomes(pids))) > 10


def test_rank_that_leaves_is_named_and_what_it_sent_before_is_good(two):
    def job(comm: Comm) -> Any:
        x = np.full(200_000, 7.0) if comm.rank == 0 else np.zeros(200_000)
        comm.broadcast(x)
        if comm.rank == 0:
            return None  # closes
        assert (x == 7).all()
        comm.all_reduce(x)

    outcomes = two.run(job, 1)
    assert outcomes[0].get() is None
    assert (outcomes[1].error, outcomes[1].rank) == ("PeerDiedError", 0)
    assert "rank 0 closed its communicator" in outcomes[1].text


def last(comm: Comm) -> bool:
    return comm.rank == comm.size - 1


CALLS: dict[str, Any] = {
    "another collective": lambda comm, x: comm.broadcast(x) if comm.rank else comm.all_reduce(x),
    "another op": lambda comm, x: comm.all_reduce(x, "min" if comm.rank else "max"),
    "another dtype": lambda comm, x: comm.all_reduce(x.astype("i4") if comm.rank else x),
    "another shape": lambda comm, x: comm.all_reduce(x[: 10 - last(comm)]),
    "another root": lambda comm, x: comm.broadcast(x, root=last(comm)),
    "no elements": lambda comm, x: comm.all_reduce(x[: 0 if comm.rank else 10]),
    "nothing but no elements": lambda comm, x: comm.all_reduce(
        x[:0], "min" if comm.rank else "max"
    ),
}


@pytest.mark.parametrize("per_host", [1, 2])
def test_different_calls_on_different_hosts_raise_an_error_that_shows_both(two, per_host):
    """Each in a communicator of its own, split from one world that stays whole."""

    def job(comm: Comm) -> dict[str, str]:
        seen = {}
        for what, call in CALLS.items():
            with comm.split(0) as part:
                try:
                    part.all_reduce(np.ones(3))  # a rank may be in it when the others fail
                    call(part, np.ones(10, np.float32))
                    time.sleep(0.1)  # no rank need have waited for another one
                    part.barrier()
                    part.barrier()
                    seen[what] = "no error"
                except pycoll.CollectiveMismatchError as error:
                    seen[what] = str(error)
                comm.barrier()  # every rank keeps its part until all have seen the error
        return seen

    (by_rank,) = two.run_jobs([job], per_host)
    wrong = [
        f"rank {rank}, {what}: {text}"
        for rank, seen in enumerate(by_rank)
        for what, text in seen.items()
        if not re.search("as operation #2, rank.*called.*at ", text, re.DOTALL)
    ]
    assert not wrong, "\n".join(wrong)
    assert list(by_rank[0]) == list(CALLS)


def test_message_of_another_size_raises_on_both_hosts(two):
    def job(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(np.ones(5), 1)
        else:
            comm.recv(np.ones(4), 0)
        comm.barrier()

    for outcome in two.run(job):
        assert outcome.error == "CollectiveMismatchError", outcome
        assert "rank 0 sent 5 f64" in outcome.text and "expects 4 f64" in outcome.text


def test_rank_that_never_comes_to_a_call_is_named(two):
    def job(comm: Comm) -> None:
        comm.barrier()
        if comm.rank == 2:
            time.sleep(2.5)
            return
        comm.all_reduce(np.ones(3))

    outcomes = two.run(job, 2, timeout_s="1.5")
    for rank in (0, 1, 3):
        assert outcomes[rank].error == "TimeoutError", outcomes[rank]
        assert "rank 2 has not entered it: it finished #1, barrier" in outcomes[rank].text


def test_rank_that_does_not_join_is_named(two):
    def job() -> Any:
        return pycoll.init(timeout_s=1.5)

    pids = two.start_world(job, [0, 1], WORLD_SIZE="3")
    for outcome in two.outcomes(pids):
        assert outcome.error == "TimeoutError" and "rank 2 of 3 did not join" in outcome.text


@pytest.mark.slow
def test_interfaces_are_named_as_for_nccl(two):
    """Those that NCCL would not take are refused, with a list of the interfaces of the host."""
    wrong = []
    for names in ("=eth0", "^docker,v", "docker,eth"):
        for outcome in two.run(lambda comm: comm.transport, 1, PYCOLL_IFNAME=names):
            if outcome.error or outcome.value != "tcp":
                wrong.append((names, outcome))
    for names in ("=eth", "^=docker0,eth0", "ib,=eth0"):
        for outcome in two.run(lambda comm: None, 1, PYCOLL_IFNAME=names):
            named = f"PYCOLL_IFNAME={names}" in outcome.text and "eth0 (10.77.0." in outcome.text
            if outcome.error != "UsageError" or not named:
                wrong.append((names, outcome))
    assert not wrong, wrong


@pytest.mark.slow
def test_unauthenticated_peers_at_the_ports_are_refused_and_do_no_harm(two):
    """Ranks join in a mixed order, so that the peers find every port open for a while."""
    counts = unauthenticated.Counts(len(unauthenticated.KINDS))

    def main() -> tuple[float, float]:
        begin = time.monotonic()
        late_s = [0.9, 0.1, 0.6, 0.0][int(os.environ["RANK"])]  # rank 0, which all ask, is last
        time.sleep(late_s)
        with pycoll.init(timeout_s=30) as comm:
            total = float(comm.all_reduce(np.ones(1000))[0])
            took_s = time.monotonic() - begin
            counts.wait_for_all()
        return total, took_s

    attackers = unauthenticated.start(two, unauthenticated.KINDS, 1.5, counts)
    results = values(two.outcomes(two.start_world(main, [0, 1, 0, 1])))
    assert [total for total, _ in results] == [4.0] * 4
    assert max(took_s for _, took_s in results) < 20
    values(two.outcomes(attackers))


def test_communicators_come_and_go_and_leave_nothing(two):
    """Also after a failure."""

    ports = [str(free_port()) for _ in range(6)]

    def main() -> tuple[int, int]:
        rank = int(os.environ["RANK"])
        counts = []
        for i in range(6):
            os.environ["MASTER_PORT"] = ports[i]
            comm = pycoll.init(timeout_s=20)
            part = comm.split(0)
            assert part is not None
            assert part.all_reduce(np.ones(1000))[0] == 2
            if i % 2 and rank == 0:
                comm.close()
            elif i % 2:
                with pytest.raises(pycoll.PeerDiedError):
                    comm.all_reduce(np.ones(10))
            part.close()
            comm.close()
            # A thread that was joined is in the list for a moment more.
            end_s = time.monotonic() + 5
            while counts and len(os.listdir("/proc/self/task")) > counts[0][1]:
                if time.monotonic() > end_s:
                    break
                time.sleep(0.01)
            tasks = len(os.listdir("/proc/self/task"))
            counts.append((len(os.listdir("/proc/self/fd")), tasks))
        assert counts[-1] <= counts[0], counts
        return counts[-1]

    values(two.outcomes(two.start_world(main, [0, 1])))


@pytest.mark.slow
@plain_and_tls
def test_rank_that_left_after_it_sent_is_no_failure_however_slow_its_bytes_are(two, links):
    """Rank 3 hears that rank 1 has left long before the last of its bytes reach rank 2."""

    def job(comm: Comm) -> None:
        x = np.full(100_000, comm.rank, np.float32)
        comm.broadcast(x, root=1, algorithm="star/simple")
        assert (x == 1).all()
        if comm.rank == 1:
            comm.send(np.arange(30_000.0), 2)
        elif comm.rank == 2:
            assert (comm.recv(np.empty(30_000), 1) == np.arange(30_000.0)).all()
            comm.send(x, 3)
        elif comm.rank == 3:
            comm.recv(x, 2)

    two.set_rate("8mbit")
    try:
        two.run_jobs([job], 2, **links)
    finally:
        two.set_rate(None)
