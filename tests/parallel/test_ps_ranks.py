"""Parameter servers on ranks: equal to data parallel, bytes, killed servers, workers that come."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import pycoll
from pycoll import PeerDiedError, UsageError
from pycoll import parallel as pc
from pycoll.parallel.ps.keys import HashRing
from pycoll.parallel.ps.messages import HEADER_BYTES
from pycoll.parallel.ps.tables import BLOCK

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

SERVERS, WORKERS, STEPS, ROWS, DIM = 2, 3, 4, 40, 3
OPTIMIZERS = {
    "sgd": (pc.ps.SGD(0.3), lambda params: torch.optim.SGD(params, lr=0.3)),
    "adagrad": (pc.ps.Adagrad(0.3), lambda params: torch.optim.Adagrad(params, lr=0.3)),
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Indices of rows [6, 2] and targets [6], for each step."""
    made = torch.Generator().manual_seed(5)
    return [
        (torch.randint(ROWS, (6, 2), generator=made), torch.randint(10, (6,), generator=made))
        for _ in range(STEPS)
    ]


def head() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(2 * DIM, 300), nn.Tanh(), nn.Linear(300, 10)).double()


def first_rows() -> torch.Tensor:
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def of_one_process(name: str) -> list[torch.Tensor]:
    """The weights of data parallel training: the mean over the whole batch."""
    model, rows = head(), nn.Parameter(first_rows())
    optimizer = OPTIMIZERS[name][1]([*model.parameters(), rows])
    for x, y in batches():
        functional.cross_entropy(model(rows[x].flatten(1)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [rows.detach(), *(p.detach() for p in model.parameters())]


def sent_by(worker) -> int:
    """Bytes that the core has sent for a worker, by its own record."""
    links = worker._servers.links.values()
    records = [record for link in links for record in link.comm.message_record()]
    return sum(record["nbytes"] for record in records if record["kind"] == "send")


def trained(comm, name):
    """The weights of a worker, its report, and the bytes that it sent in training."""
    job = pc.ps.start(comm, servers=SERVERS, optimizer=OPTIMIZERS[name][0])
    if job.worker is None:
        return job.serve()
    worker, model = job.worker, head()
    layer = worker.embedding("rows", ROWS, DIM, dtype=torch.float64, values=first_rows())
    worker.register(model)
    worker.ledger.clear()
    before = sent_by(worker)
    for x, y in worker.shard(batches()):
        worker.pull()
        functional.cross_entropy(model(layer(x).flatten(1)), y).backward()
        worker.push()
        worker.clock()
    sent = sent_by(worker) - before
    report = worker.report()
    worker.pull()
    found = [worker.pull_rows(layer.table, torch.arange(ROWS))]
    found += [p.detach() for p in model.parameters()]
    job.close()
    return found, report, sent


def expected_bytes(worker: int) -> dict[str, tuple[int, int]]:
    """Calls and bytes by kind, by the formula: headers, 8 bytes a key, values of touched rows."""
    ring = HashRing(SERVERS)
    blocks = -(-sum(p.numel() for p in head().parameters()) // BLOCK)
    dense = STEPS * blocks * BLOCK * 8
    calls, touched = 0, 0
    servers = ring.owners("rows", np.arange(ROWS))[:, 0]
    for x, _ in batches():
        rows = x[2 * worker : 2 * worker + 2].unique()
        touched += len(rows)
        calls += len(set(servers[rows.numpy()].tolist()))
    pulls, pushes = SERVERS * STEPS + calls, 2 * SERVERS * STEPS
    return {
        "pull": (pulls, HEADER_BYTES * pulls + 8 * touched),
        "answer to pull": (pulls, HEADER_BYTES * pulls + dense + touched * DIM * 8),
        "push": (pushes, HEADER_BYTES * pushes + dense + touched * (8 + DIM * 8)),
        "answer to push": (pushes, HEADER_BYTES * pushes),
    }


def all_kinds(comm):
    return {name: trained(comm, name) for name in OPTIMIZERS}


def test_sync_servers_equal_data_parallel_and_send_the_touched_keys_alone():
    """Two seconds: 2 servers and 3 workers, dense and sparse, twice."""
    found = pycoll.run_ranks(all_kinds, SERVERS + WORKERS, timeout_s=30)
    for name in OPTIMIZERS:
        expected = of_one_process(name)
        for number in range(WORKERS):
            weights, report, sent = found[SERVERS + number][name]
            for a, b in zip(weights, expected, strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-10), name
            counted = {kind: report.nbytes[kind] for kind in expected_bytes(number)}
            assert counted == expected_bytes(number)
            assert sent == counted["pull"][1] + counted["push"][1]
            assert set(report.staleness) == {0}


def dies_within_a_push(updates, num_pushes):
    """Kills this server after so many pushes: made and copied, and not acknowledged."""
    push, calls = updates.push, []

    def push_and_die(*args):
        push(*args)
        calls.append(1)
        if len(calls) == num_pushes:
            os.kill(os.getpid(), signal.SIGKILL)

    updates.push = push_and_die


def killed_servers(comm, mode, servers):
    """Server 1 is killed, of three also server 0 when it has made new copies; training goes on."""
    job = pc.ps.start(comm, servers=servers, mode=mode, copies=2, optimizer=pc.ps.Adagrad(0.1))
    if job.worker is None:
        updates = job.server._updates
        if comm.rank == 1:
            dies_within_a_push(updates, 9)
        elif comm.rank == 0 and servers == 3:
            restore = updates.copies.restore_all

            def restore_and_die_later():
                restore()
                dies_within_a_push(updates, 9)

            updates.copies.restore_all = restore_and_die_later
        return job.serve()
    worker = job.worker
    table = worker.table("t", 100, 2, dtype=torch.float64)
    for step in range(20):
        rows = torch.arange(step, 100, 20)
        values = worker.pull_rows(table, rows)
        values.grad = torch.ones_like(values)
        table.leaves.append((rows, values))
        worker.push()
        worker.clock()
    found = worker.pull_rows(table, torch.arange(100))
    job.close()
    return found, worker._servers.dead


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_goes_on_without_loss_when_servers_are_killed(mode, servers):
    """A second: each row gets one gradient of 1 from each worker, which Adagrad turns into -0.1."""
    found = pycoll.run_ranks(
        killed_servers, servers + 2, mode, servers, timeout_s=20, return_errors=True
    )
    assert isinstance(found[1], PeerDiedError) and found[servers - 1 if servers > 2 else 0] is None
    assert servers == 2 or isinstance(found[0], PeerDiedError)
    for values, dead in found[servers:]:
        assert dead == (0b10 if servers == 2 else 0b11)
        expected = -0.1 if mode == "sync" else -0.1 - 0.1 / 2**0.5
        if mode == "sync":
            assert torch.allclose(values, torch.full_like(values, expected), atol=1e-8)
    if mode == "async":  # the worker that pulled last has both updates of all rows
        latest = min(values.sum() for values, _ in found[servers:])
        assert latest.item() == pytest.approx(200 * expected, abs=1e-6)


def dead_server_without_copies(comm):
    job = pc.ps.start(comm, servers=2, mode="async")
    if job.worker is None:
        if comm.rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return job.serve()
    table = job.worker.table("t", 100, 2)
    try:
        while True:
            job.worker.pull_rows(table, torch.arange(100))
            time.sleep(0.01)
    except PeerDiedError as error:
        job.worker._servers.close()
        return str(error)


def dead_worker(comm):
    job = pc.ps.start(comm, servers=1, mode="sync", optimizer=pc.ps.SGD(1.0))
    if job.worker is None:
        return job.serve()
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    job.worker.register([weight])
    for step in range(4):
        job.worker.pull()
        if (job.worker.number, step) == (2, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        weight.grad = torch.ones_like(weight)
        job.worker.push()
        job.worker.clock()
    job.worker.pull()
    job.close()
    return weight.item()


def wrong_key(comm):
    job = pc.ps.start(comm, servers=1, mode="async")
    if job.worker is None:
        return job.serve()
    table = job.worker.table("t", 5, 1)
    with pytest.raises(UsageError, match="no server has key 5 of table 't'"):
        job.worker.pull_rows(table, torch.tensor([5]))
    job.close()
    return True


def colocated(comm):
    """Every rank is a worker and a server, whose keys have copies."""
    job = pc.ps.start(
        comm, servers=3, colocated=True, copies=2, mode="sync", optimizer=pc.ps.SGD(1.0)
    )
    table = job.worker.table("t", 60, 1, dtype=torch.float64)
    for _ in range(3):
        values = job.worker.pull_rows(table, torch.arange(60))
        values.grad = torch.full_like(values, 1.0 + comm.rank)
        table.leaves.append((torch.arange(60), values))
        job.worker.push()
        job.worker.clock()
    found = job.worker.pull_rows(table, torch.arange(60))
    job.close()
    return found.unique().tolist()


def test_ends_of_ranks_are_survived_or_said():
    found = pycoll.run_ranks(dead_server_without_copies, 4, timeout_s=20, return_errors=True)
    assert all("server 1 ended, and" in text and "copies=2" in text for text in found[2:])
    assert found[0] is None
    found = pycoll.run_ranks(dead_worker, 4, timeout_s=20, return_errors=True)
    assert found[1] == found[2] == -4.0 and isinstance(found[3], PeerDiedError)


def test_ranks_may_be_servers_and_workers():
    assert pycoll.run_ranks(colocated, 3, timeout_s=20) == [[-6.0]] * 3
    assert pycoll.run_ranks(wrong_key, 3, timeout_s=20) == [None, True, True]


NEWCOMER = """
import sys, torch
from torch import nn
from pycoll import parallel as pc
weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
with pc.ps.join(sys.argv[1:]) as worker:
    worker.register([weight])
    worker.pull()
    first = worker.steps
    while worker.steps < 6:
        weight.grad = torch.full_like(weight, 3.0)
        worker.push()
        worker.clock()
        worker.pull()
print(worker.number, first, weight.item())
"""


def with_a_newcomer(comm, addresses):
    job = pc.ps.start(comm, servers=2, mode="sync", optimizer=pc.ps.SGD(1.0), listen=addresses)
    if job.worker is None:
        return job.serve()
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    worker, process = job.worker, None
    worker.register([weight])
    while worker.steps < 6:
        worker.pull()
        if worker.steps == 2:  # the newcomer comes, and both wait for it
            command = [sys.executable, "-c", NEWCOMER, *addresses]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            while len(worker.report().clocks) < 2:
                time.sleep(0.02)
        weight.grad = torch.ones_like(weight)
        worker.push()
        worker.clock()
    worker.pull()
    job.close()
    return weight.item(), process.communicate(timeout=20)[0]


def test_worker_comes_late_and_counts_in_the_mean():
    """Two seconds: another process imports torch."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(f"127.0.0.1:{free.getsockname()[1]}")
    found = pycoll.run_ranks(with_a_newcomer, 3, ports, timeout_s=30)
    weight, text = found[2]
    assert text.split() == ["1", "2", "-10.0"]  # 2 steps of 1, 4 of the mean of 1 and 3
    assert weight == -10.0


def by_replicas(comm, replicas, make):
    """Weights and what was counted, of one script with a switch."""
    mesh = pc.mesh(dp=-1, comm=comm)
    model = pc.parallelize(head(), mesh, replicas=replicas)
    optimizer = pc.optimizer(make(model.parameters()))
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in pc.shard([(first_rows()[x].flatten(1), y) for x, y in batches()], mesh):
        model.step(x, y, loss=functional.cross_entropy)
        optimizer.step()
        rates.step()
    with optimizer.mean_weights():
        found = [p.detach().clone() for p in model.parameters()]
    counted = {name: entry.nbytes for (_, name), entry in mesh.ledger.entries.items()}
    optimizer.close()
    mesh.close()
    return found, counted


def switched(comm):
    """By all-reduce, and by servers that are replicas, too, with copies and without."""
    wanted, _ = by_replicas(comm, "allreduce", torch.optim.AdamW)
    for options in ("", ":servers=3,copies=2", ":mode=ksync,k=3", ":mode=ssp,staleness=0"):
        found, counted = by_replicas(comm, "ps" + options, torch.optim.AdamW)
        is_sync = "ssp" not in options
        for a, b in zip(wanted, found, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-10) == is_sync, options
    found, counted = by_replicas(comm, "ps:compress=int8", lambda p: torch.optim.SGD(p, lr=0.1))
    if comm.rank != 0:  # rank 0 has the server, and sends nothing to itself
        blocks = counted["push"] - STEPS * HEADER_BYTES
        assert blocks == STEPS * 5 * BLOCK * 260 // 256
    return True


def test_one_switch_trains_with_servers():
    assert pycoll.run_ranks(switched, 3, timeout_s=20) == [True] * 3
    for text, message in (
        ("ps:mode=fast", "mode='fast', expected one of sync"),
        ("ps:staleness=x", "'staleness=x' is no option; options: mode=sync, servers=1"),
        ("ps:k=", "'k=' is no option"),
        ("ps:servers=0", "servers=0: expected at least one server"),
        ("ps:mode=ssp,staleness=-1", "staleness=-1, expected 0 or more clocks"),
        ("ps:mode=ksync,k=9", "k=9, and there are 2 workers"),
    ):
        found = pycoll.run_ranks(
            by_replicas, 2, text, torch.optim.AdamW, timeout_s=20, return_errors=True
        )
        assert all(isinstance(error, UsageError) and message in str(error) for error in found)
