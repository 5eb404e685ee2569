"""What ranks on several hosts do in tests, over whatever links."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from collective_oracles import INFO, ORACLES, arguments, roots_of
from comm_cases import PROTOCOLS, builtin_algorithms, inputs

import pycoll

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


def split_and_group(comm: Comm) -> list[str]:
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


def messages(comm: Comm) -> None:
    sizes = [0, 1, 40, 41, 4096, 64 << 10, (64 << 10) + 1, 300_000, 5_000_000]
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


def asynchronous_and_coalesced(comm: Comm) -> None:
    works = [
        comm.all_reduce(np.full(1 << (2 * i), comm.rank + 1.0), async_op=True) for i in range(10)
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


def fork(comm: Comm) -> int:
    comm.all_reduce(np.ones(10))
    pid = os.fork()
    if pid == 0:
        before = len(os.listdir("/proc/self/fd"))
        comm.close()
        os._exit(0 if before < 40 else 1)
    status = os.waitpid(pid, 0)[1]
    comm.all_reduce(np.ones(10))
    return status


def every_collective(comm: Comm) -> None:
    for name in ORACLES:
        for rows in (1, 1000, 200_000):
            one_case(comm, name, rows, 0, None)
    comm.barrier()


# Bytes that leave host 0 of two hosts with two ranks each, in messages.
FRACTIONS = [
    ("all_reduce", "ring", 1.5),  # of four ranks one sends to the other host, 2(n-1)/n
    ("all_reduce", "hierarchical", 1.0),  # 2(H-1)/H
    ("reduce_scatter", "hierarchical", 0.5),
    ("all_gather", "hierarchical", 0.5),
    ("all_to_all", "pairwise", 1.0),
    ("all_to_all", "hierarchical", 1.0),
    ("broadcast", "hierarchical", 1.0),
]


def sent_per_message(comm: Comm, name: str, algorithm: str) -> float:
    """What this host sends for one message of 4 MiB, as its interface counts, in messages."""
    message = 4 << 20
    rows = message // 4
    x = np.zeros(rows if name != "all_gather" else rows // comm.size, np.float32)
    run = getattr(comm, name)
    run(x, algorithm=f"{algorithm}/simple")
    comm.barrier()
    before = _sent_here()
    comm.barrier()  # nobody sends more before all have looked
    for _ in range(5):
        run(x, algorithm=f"{algorithm}/simple")
    comm.barrier()
    return (_sent_here() - before) / (5 * message)


def _sent_here() -> int:
    """Bytes, as the interface of the calling process's host counts them."""
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])
