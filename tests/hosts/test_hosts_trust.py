"""Which processes may join a job of several hosts; other processes are refused."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_client
from namespaces import TOKEN, Network, free_port, values

import pycoll
from pycoll import torch_build
from pycoll._core import bootstrap

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

OTHER_UID = 65534


def sum_of_ranks() -> float:
    with pycoll.init(timeout_s=60) as comm:
        for _ in range(3):
            total = comm.all_reduce(np.full(1000, comm.rank + 1.0))
        return float(total[0])


def test_ranks_of_several_hosts_without_a_secret_are_refused_with_what_to_do(two):
    env = {"PYCOLL_TOKEN": ""}
    outcomes = two.outcomes(two.start_world(lambda: pycoll.init(timeout_s=20), [0, 1], **env))
    for one in outcomes:
        assert one.error == "UsageError", one
        assert "the ranks meet at 10.77.0.1:" in one.text, one
        assert "PYCOLL_TOKEN is not set" in one.text and "openssl rand -hex 16" in one.text, one
        assert one.seconds < 10
    # Not at its own address either, for that is no loopback address.
    (alone,) = two.outcomes(two.start_world(sum_of_ranks, [0], **env, WORLD_SIZE="2"))
    assert alone.error == "UsageError" and "not a loopback address" in alone.text, alone


def test_token_none_opens_the_job_to_all(two):
    pids = two.start_world(sum_of_ranks, [0, 1], PYCOLL_TOKEN="none")
    assert values(two.outcomes(pids)) == [3.0, 3.0]


def test_jobs_of_one_host_need_no_token_and_do_not_meet_across_hosts(two):
    """The same port on loopback in two network namespaces: two jobs."""
    port = str(free_port())
    env = {"PYCOLL_TOKEN": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = [pid for host in (0, 1) for pid in two.start_world(sum_of_ranks, [host, host], **env)]
    assert values(two.outcomes(pids)) == [3.0] * 4


@pytest.mark.torch
def test_torch_group_of_several_hosts_needs_a_secret(two, tmp_path):
    pytest.importorskip("torch")
    import torch
    import torch.distributed as dist

    import pycoll.torch  # noqa: F401  registers the backend where no package is installed

    found = torch_build.Torch.find()
    assert found is not None
    torch_build.find_or_build(found, torch_build.package_folder())

    def main() -> float:
        x = torch.ones(3)
        try:
            dist.init_process_group("pycoll")
            dist.all_reduce(x)
        except Exception:
            # Rank 0 has torch's store, in which the other one reads why.
            (tmp_path / os.environ["RANK"]).touch()
            end_s = time.monotonic() + 20
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end_s:
                time.sleep(0.01)
            raise
        dist.destroy_process_group()
        return float(x[0])

    refused = two.outcomes(two.start_world(main, [0, 1], PYCOLL_TOKEN=""))
    for one in refused:
        assert one.error == "ValueError", one
        assert "ranks on several hosts (host0, host1) need a secret" in one.text, one
    assert values(two.outcomes(two.start_world(main, [0, 1]))) == [2.0, 2.0]
    assert values(two.outcomes(two.start_world(main, [0, 0], PYCOLL_TOKEN=""))) == [2.0, 2.0]


def listening_ports() -> list[tuple[str, int]]:
    """Addresses at which programs of the calling process's host listen."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A":
            octets = bytes.fromhex(address)[::-1]
            found.append((".".join(map(str, octets)), int(port, 16)))
    return found


def speak(address: str, port: int, rank: int, recorded: bytes) -> str:
    """One try to become a rank: of the store, of the mesh, or with what a rank once said."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1) as s:
        s.settimeout(1)
        if recorded:
            s.sendall(recorded)
            answer = store_client.read_frame(s)
            while answer is not None and answer[0] == store_client.CHALLENGE:
                answer = store_client.read_frame(s)
            return "JOINED" if answer and answer[0] == store_client.OK else "refused"
        try:
            answer = store_client.join(s, "guess", rank)
        except AssertionError:  # not a store: a port of the links, or of shrink
            return "refused"
        return "JOINED" if answer == store_client.OK else "refused"
    return "refused"


def attack(
    address: str, port: int, host_id: str, recorded: bytes, tries: int, other_user: bool
) -> dict[str, int]:
    """Tries so often to become rank 2, of that host id. How often each outcome came."""
    "".encode("idna")  # loaded before the process cannot read it any more
    if other_user:
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
    counts: dict[str, int] = {}
    for i in range(tries):
        for what in (b"", recorded):
            outcome = speak(address, port, 2, what)
            counts[outcome] = counts.get(outcome, 0) + 1
        if i % 10 == 0:
            for token in ("", "none", f"uid 0 {host_id}", "uid 0 "):
                try:
                    store = bootstrap.TcpStore(address, port, token, 2, 0.02)
                    store.set("hosts/places/2", host_id)
                    counts["JOINED"] = counts.get("JOINED", 0) + 1
                except pycoll.Error:
                    counts["refused"] = counts.get("refused", 0) + 1
        for place in listening_ports():
            outcome = speak(*place, 2, b"")
            counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def record(address: str, port: int) -> bytes:
    """What a rank with the token says when it joins the store of another job as rank 2."""
    number = bytes(16)
    with socket.create_connection((address, port), 5) as s:
        s.sendall(store_client.hello(2, number))
        answer = store_client.read_frame(s)
        assert answer is not None
        proof = store_client.proof(TOKEN, b"connect", 2, number, answer[1])
        last = store_client.frame(store_client.PROOF, store_client.text(proof), 2)
        s.sendall(last)
        answer = store_client.read_frame(s)
        assert answer is not None and answer[0] == store_client.OK
    return store_client.hello(2, number) + last


def job_among_attackers(network: Network, tries: int) -> tuple[list[Any], list[dict[str, int]]]:
    """Ranks 0 and 1 wait for rank 2 while others try to be rank 2; then it comes."""
    port = free_port()
    address = network.address(0)

    def recorded_elsewhere() -> bytes:
        server = bootstrap.TcpStoreServer(address, port + 20_000, TOKEN)
        try:
            return record(address, port + 20_000)
        finally:
            server.stop()

    recorded = network.outcome(network.start(0, recorded_elsewhere)).get()
    ids = [network.outcome(network.start(host, bootstrap.host_id)).get() for host in (0, 1)]
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    world["PYCOLL_TOKEN"] = TOKEN

    def start(rank: int, host: int, fn: Callable[[], Any]) -> int:
        return network.start(host, fn, **world, RANK=str(rank))

    ranks = [start(0, 0, sum_of_ranks), start(1, 1, sum_of_ranks)]
    attackers = []
    for host, host_id, other_user in [(0, ids[1], True), (1, ids[0], True), (1, ids[1], False)]:
        job = functools.partial(attack, address, port, host_id, recorded, tries, other_user)
        attackers.append(network.start(host, job, PYCOLL_TOKEN=""))
    counts = [network.outcome(pid, 100).get() for pid in attackers[:2]]
    ranks.append(start(2, 1, sum_of_ranks))
    counts.append(network.outcome(attackers[2], 100).get())
    return network.outcomes(ranks), counts


@pytest.mark.parametrize("tries", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_other_users_and_other_hosts_are_refused_and_do_not_disturb_the_job(two, tries):
    outcomes, counts = job_among_attackers(two, tries)
    for count in counts:
        assert set(count) == {"refused"} and count["refused"] > 2 * tries, counts
    assert values(outcomes) == [6.0] * 3


def test_host_name_of_another_rank_cannot_control_the_terminal(two):
    def main() -> str:
        comm = pycoll.init(timeout_s=20)
        if comm.rank == 1:
            os._exit(3)
        with pytest.raises(pycoll.PeerDiedError) as raised:
            comm.barrier()
        return str(raised.value)

    def renamed() -> str:
        socket.sethostname("evil\x1b[31m\n" if os.environ["RANK"] == "1" else "good")
        return main()

    first, _ = two.outcomes(two.start_world(renamed, [0, 1]))
    assert first.value is not None, first
    assert r"evil\x1b[31m\x0a" in first.value and "\x1b" not in first.value, first.value
