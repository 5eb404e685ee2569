"""Ranks on two and four hosts: whatever they do equals NumPy, as on one host."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
from collective_oracles import INFO, ORACLES, arguments, roots_of
from comm_cases import PROTOCOLS, builtin_algorithms, crc, inputs

import pycoll
from pycoll import UsageError

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator
SLOT_BYTES = 128 << 10


def check(name: str, values: np.ndarray, rank: int, root: int, result: Any, case: object) -> None:
    expected = ORACLES[name].expected(values, rank, root, "sum")
    if expected is None:
        assert result is None or name == "exscan", case
        return
    assert result.shape == expected.shape, case
    if not INFO[name].has_op:
        assert result.tobytes() == expected.tobytes(), case
        return
    bound = ORACLES[name].expected(np.abs(values).astype(np.float64), rank, root, "sum")
    error = np.abs(result - expected)
    assert (error <= len(values) * np.finfo(np.float32).eps * bound).all(), case


def one_case(comm: Comm, name: str, rows: int, root: int, algorithm: str | None) -> None:
    shape = ORACLES[name].leading(comm.size, rows)
    values = inputs(comm.size, int(np.prod(shape))).reshape(comm.size, *shape)
    x = values[comm.rank].copy()
    result = getattr(comm, name)(x, **arguments(name, root), algorithm=algorithm)
    check(name, values, comm.rank, root, result, (name, rows, root, algorithm))


def every_algorithm(comm: Comm) -> tuple[str, int]:
    for name in ORACLES:
        for algorithm in builtin_algorithms(name):
            for protocol in PROTOCOLS:
                for rows in (0, 1, 4099, SLOT_BYTES // 4 + 5):
                    roots = roots_of(name, comm.size) if rows == 4099 else [0]
                    for root in roots:
                        one_case(comm, name, rows, root, f"{algorithm}/{protocol}")
    return comm.transport, comm.host_rank


@pytest.mark.parametrize("per_host", [1, 2])
def test_every_collective_algorithm_protocol_and_size_equals_numpy(two, per_host):
    outcomes = two.run(every_algorithm, per_host)
    assert [o.get() for o in outcomes] == [("tcp", i) for i in range(per_host)] * 2
    assert all(o.fds_leaked <= 1 for o in outcomes)  # NumPy opens one


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 2])
def test_every_collective_on_four_hosts_equals_numpy(four, per_host):
    for outcome in four.run(every_algorithm, per_host, timeout_s="60"):
        outcome.get()


def test_four_hosts_run_what_pycoll_chooses(four):
    def chosen(comm: Comm) -> None:
        for name in ORACLES:
            for rows in (1, 1000, 200_000):
                one_case(comm, name, rows, 0, None)
        comm.barrier()

    for outcome in four.run(chosen, 1):
        outcome.get()


def test_hosts_may_have_different_numbers_of_ranks_in_any_order(two):
    """Ranks 0 and 2 on one host, 1, 3 and 4 on the other."""

    def job(comm: Comm) -> tuple[int, int]:
        for rows in (1, 1000, 100_000):
            one_case(comm, "all_reduce", rows, 0, None)
            one_case(comm, "all_to_all", rows, 0, None)
        return comm.host_rank, crc(comm.all_gather(np.array([comm.rank])))

    pids = []
    hosts = [0, 1, 0, 1, 1]

    def main() -> Any:
        with pycoll.init(timeout_s=20) as comm:
            return job(comm)

    port = "20999"
    for rank, host in enumerate(hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": "5", "MASTER_ADDR": two.address(0)}
        pids.append(two.start(host, main, MASTER_PORT=port, PYCOLL_TOKEN="t", **env))
    results = [two.outcome(pid).get() for pid in pids]
    assert [host_rank for host_rank, _ in results] == [0, 0, 1, 1, 2]
    assert len({gathered for _, gathered in results}) == 1


def test_split_and_group_within_and_between_hosts(two):
    def job(comm: Comm) -> list[str]:
        within = comm.split(comm.rank // 2)
        between = comm.split(comm.rank % 2)
        odd = comm.group([3, 1])
        all_again = comm.split(0, key=-comm.rank)
        assert within is not None and between is not None and all_again is not None
        for part in (within, between, all_again, odd):
            if part is None:
                continue
            for rows in (1, 1000, 100_000):
                one_case(part, "all_reduce", rows, 0, None)
                one_case(part, "all_to_all", rows, 0, None)
        assert all_again.rank == comm.size - 1 - comm.rank
        kinds = [within.transport, between.transport, all_again.transport]
        for part in (within, odd, between, all_again):
            if part is not None:
                part.close()
        one_case(comm, "all_reduce", 1000, 0, None)
        return kinds

    for outcome in two.run(job, 2):
        assert outcome.get() == ["shm", "tcp", "tcp"]


def test_messages_of_every_size_arrive_in_order_between_hosts(two):
    sizes = [0, 1, 40, 41, 4096, 64 << 10, (64 << 10) + 1, 300_000, 5_000_000]

    def job(comm: Comm) -> None:
        for nbytes in sizes:
            for peer in range(comm.size):
                x = np.full(nbytes, comm.rank * 16 + peer, np.uint8)
                comm.send(x, peer, tag=nbytes, async_op=True)
        for nbytes in reversed(sizes):
            for peer in reversed(range(comm.size)):
                got = comm.recv(np.empty(nbytes, np.uint8), peer, tag=nbytes)
                assert (got == peer * 16 + comm.rank).all(), (nbytes, peer)
        # Everyone sends before anyone receives.
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for i in range(200):
            comm.send(np.full(1000, i, np.int32), right)
        for i in range(200):
            assert (comm.recv(np.empty(1000, np.int32), left) == i).all()
        comm.send(np.zeros(3_000_000), right)
        comm.recv(np.empty(3_000_000), left)
        got = np.empty(1)
        if comm.rank == 0:
            sources = {comm.recv_any(got, tag=7) for _ in range(comm.size - 1)}
            assert sources == set(range(1, comm.size))
        else:
            comm.send(np.ones(1), 0, tag=7)
        comm.barrier()

    for outcome in two.run(job, 2):
        outcome.get()


def test_asynchronous_and_coalesced_operations_between_hosts(two):
    def job(comm: Comm) -> None:
        works = [
            comm.all_reduce(np.full(1 << (2 * i), comm.rank + 1.0), async_op=True)
            for i in range(10)
        ]
        total = comm.size * (comm.size + 1) / 2
        time.sleep(0.05)
        assert all((work.wait() == total).all() for work in works)
        with comm.coalesce():
            a = comm.all_reduce(np.full(3, 1.0))
            b = comm.all_reduce(np.full(5, 2.0))
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            c = comm.recv(np.empty(70_000), left)
            comm.send(np.full(70_000, comm.rank + 0.5), right)
        assert (a == comm.size).all() and (b == 2 * comm.size).all() and (c == left + 0.5).all()

    for outcome in two.run(job, 2):
        outcome.get()


def test_direct_between_hosts_is_refused_in_words(two):
    def job(comm: Comm) -> str:
        with pytest.raises(UsageError) as refused:
            comm.all_reduce(np.ones(1000), algorithm="ring/direct")
        comm.all_reduce(np.ones(1000))
        return str(refused.value)

    for outcome in two.run(job):
        assert "direct needs all ranks on one host" in outcome.get()


def test_forked_child_keeps_no_link_and_says_nothing(two):
    def job(comm: Comm) -> int:
        comm.all_reduce(np.ones(10))
        pid = os.fork()
        if pid == 0:
            before = len(os.listdir("/proc/self/fd"))
            comm.close()
            os._exit(0 if before < 40 else 1)
        status = os.waitpid(pid, 0)[1]
        comm.all_reduce(np.ones(10))
        return status

    for outcome in two.run(job):
        assert outcome.get() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_operations_on_four_hosts_equal_numpy(four):
    seed = random.randrange(1 << 30)

    def job(comm: Comm) -> None:
        choose = random.Random(seed)
        for _ in range(300):
            name = choose.choice(sorted(ORACLES))
            rows = choose.choice([0, 1, 7, 100, 5000, 60_000])
            algorithm = choose.choice([*builtin_algorithms(name), None])
            root = choose.choice(roots_of(name, comm.size))
            one_case(comm, name, rows, root, algorithm)

    for outcome in four.run(job, 2, timeout_s="60"):
        assert not outcome.error, f"seed {seed}: {outcome.text}"
