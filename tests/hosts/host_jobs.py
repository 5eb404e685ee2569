"""Jobs of ranks on several hosts, for links of every kind. Each checks its own results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import INFO
from comm_cases import PROTOCOLS, builtin_algorithms, inputs
from namespaces import TOKEN

import pycoll
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments, roots_of

Comm = pycoll.Communicator
SLOT_BYTES = 128 << 10
TLS = {"PYCOLL_TLS": "1", "PYCOLL_TOKEN": TOKEN}
plain_and_tls = pytest.mark.parametrize(
    "links", [{}, pytest.param(TLS, marks=pytest.mark.slow)], ids=["plain", "TLS"]
)
HIERARCHICAL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


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


def algorithms_here(comm: Comm, name: str) -> list[str]:
    """The algorithms for any world, and those for hosts of several ranks where this is one."""
    per_host = int(comm.all_reduce(np.array([comm.host_rank + 1]), "max")[0])
    return builtin_algorithms(name) + ["hierarchical"] * (per_host > 1 and name in HIERARCHICAL)


def every_algorithm(comm: Comm) -> tuple[str, int]:
    comm.barrier()
    for name in ORACLES:
        for algorithm in algorithms_here(comm, name):
            for protocol in PROTOCOLS:
                for rows in (0, 1, 4099, SLOT_BYTES // 4 + 5):
                    roots = roots_of(name, comm.size) if rows == 4099 else [0]
                    for root in roots:
                        one_case(comm, name, rows, root, f"{algorithm}/{protocol}")
    return comm.transport, comm.host_rank


def hierarchical_sizes(comm: Comm) -> None:
    for name in HIERARCHICAL:
        one_case(comm, name, 3, comm.size - 1, "hierarchical/ll")
        one_case(comm, name, 100_000, comm.size - 1, "hierarchical/simple")


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
    # All ranks send before any rank receives.
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
        os._exit(0 if before < 48 else before)
    status = os.waitpid(pid, 0)[1]
    comm.all_reduce(np.ones(10))
    return status


def every_collective(comm: Comm) -> None:
    for name in ORACLES:
        for rows in (1, 1000, 200_000):
            one_case(comm, name, rows, 0, None)
    comm.barrier()


@dataclass(frozen=True)
class Hosts:
    """A host's number, the number of hosts, and the ranks of each. Roots are rank 0."""

    host: int
    num_hosts: int
    per_host: int

    @property
    def n(self) -> int:
        return self.num_hosts * self.per_host

    @property
    def num_elsewhere(self) -> int:
        return self.n - self.per_host

    @property
    def is_last(self) -> bool:
        return self.host == self.num_hosts - 1


# Messages that leave a host, by collective and algorithm. A message is the larger one of a rank's
# input and its result.
FORMULAS: dict[tuple[str, str], Callable[[Hosts], float]] = {
    ("all_reduce", "ring"): lambda h: 2 * (h.n - 1) / h.n,  # one rank sends to the next host
    ("all_reduce", "hierarchical"): lambda h: 2 * (h.num_hosts - 1) / h.num_hosts,
    ("all_reduce", "one_shot"): lambda h: h.per_host * h.num_elsewhere,
    ("all_reduce", "two_shot"): lambda h: 2 * h.per_host * h.num_elsewhere / h.n,
    ("reduce_scatter", "ring"): lambda h: (h.n - 1) / h.n,
    ("reduce_scatter", "hierarchical"): lambda h: (h.num_hosts - 1) / h.num_hosts,
    ("reduce_scatter", "all_pairs"): lambda h: h.per_host * h.num_elsewhere / h.n,
    ("all_gather", "ring"): lambda h: (h.n - 1) / h.n,
    ("all_gather", "hierarchical"): lambda h: (h.num_hosts - 1) / h.num_hosts,
    ("all_gather", "all_pairs"): lambda h: h.per_host * h.num_elsewhere / h.n,
    ("broadcast", "chain"): lambda h: not h.is_last,
    ("broadcast", "star"): lambda h: h.num_elsewhere * (h.host == 0),
    ("broadcast", "hierarchical"): lambda h: [[], [0], [1, 0], [1, 1, 0], [2, 1, 0, 0]][
        h.num_hosts
    ][h.host],
    ("reduce", "star"): lambda h: h.per_host * (h.host != 0),
    ("reduce", "chain"): lambda h: h.host != 0,
    ("reduce", "hierarchical"): lambda h: h.host != 0,
    ("gather", "star"): lambda h: h.per_host / h.n * (h.host != 0),
    ("scatter", "star"): lambda h: h.num_elsewhere / h.n * (h.host == 0),
    ("all_to_all", "pairwise"): lambda h: h.per_host * h.num_elsewhere / h.n,
    ("all_to_all", "all_pairs"): lambda h: h.per_host * h.num_elsewhere / h.n,
    ("all_to_all", "hierarchical"): lambda h: h.per_host * h.num_elsewhere / h.n,
    ("scan", "chain"): lambda h: not h.is_last,
    ("scan", "all_pairs"): lambda h: h.per_host * (h.num_hosts - 1 - h.host) * h.per_host,
    ("exscan", "chain"): lambda h: 2 * (not h.is_last),
    ("neighbor_exchange", "direct"): lambda h: 1,  # half of it to either side
}
# The cases that every run checks.
TO_HOSTS = [
    *((name, "hierarchical") for name in HIERARCHICAL),
    ("all_reduce", "ring"),
    ("all_to_all", "pairwise"),
]


def sent_per_message(comm: Comm, name: str, algorithm: str) -> float:
    """Bytes that this host sends for one message of 4 MiB, by its interface, in messages.

    The least of three: on a busy machine TCP sends some packets twice.
    """
    message, sent = 4 << 20, []
    blocks = message // (4 * INFO[name].blocks_per_payload(comm.size))
    x = np.zeros(ORACLES[name].leading(comm.size, blocks), np.float32)
    for _ in range(3):
        comm.barrier()
        before = _sent_here()
        comm.barrier()  # no rank sends more before all have read the counter
        getattr(comm, name)(x, algorithm=f"{algorithm}/simple")
        comm.barrier()
        sent.append((_sent_here() - before) / message)
    return min(sent)


def sent_per_message_of(comm: Comm, cases: Iterable[tuple[str, str]]) -> dict[str, float]:
    return {"/".join(case): sent_per_message(comm, *case) for case in cases}


def differences_from_formulas(sent_by_host: list[dict[str, float]], per_host: int) -> str:
    """The cases of which hosts sent more or less than the formula says; empty: none."""
    wrong = []
    for case in sent_by_host[0]:
        formula = FORMULAS[tuple(case.split("/"))]  # type: ignore[index]
        num_hosts = len(sent_by_host)
        expected = [float(formula(Hosts(h, num_hosts, per_host))) for h in range(num_hosts)]
        for host, right in enumerate(expected):
            sent = sent_by_host[host][case]
            # A host that sends no payload still sends credits and acknowledgements.
            if abs(sent - right) > (0.03 * right if right else 0.01 * sum(expected)):
                wrong.append(f"{case}: host {host} sent {sent:.4f} messages, formula {right}")
    return "\n".join(wrong)


def _sent_here() -> int:
    """Bytes, as the interface of the calling process's host counts them."""
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])
