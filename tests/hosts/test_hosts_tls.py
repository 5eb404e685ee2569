"""Links between hosts with PYCOLL_TLS=1: all is as without, but nobody else can read it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_jobs import (
    asynchronous_and_coalesced,
    every_algorithm,
    every_collective,
    fork,
    messages,
    one_case,
    split_and_group,
)
from namespaces import free_port
from processes import wait_for_pids
from test_hosts_failures import listening_ports, loop

import pycoll
from pycoll import torch_build

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator
TOKEN = "a token that nobody guesses"
TLS = {"PYCOLL_TLS": "1", "PYCOLL_TOKEN": TOKEN}
PATTERN = b"what nobody else shall read ...."


def broadcast_pattern(comm: Comm) -> None:
    x = np.frombuffer(PATTERN * 10_000, np.uint8)
    got = comm.broadcast(x.copy() if comm.rank == 0 else np.zeros_like(x))
    assert (got == x).all()
    one_case(comm, "all_reduce", 1000, 0, None)
    one_case(comm, "all_to_all", 100_000, 0, None)


def listen(folder: Path) -> bytes:
    """All that passes the calling host's interface, until the file `over` is there."""
    seen = bytearray()
    everything = 0x0003  # ETH_P_ALL
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(everything)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        tap.bind(("eth0", 0))
        tap.settimeout(0.05)
        (folder / "listens").touch()
        while True:
            try:
                seen += tap.recv(1 << 17)
            except TimeoutError:
                if (folder / "over").exists():
                    return bytes(seen)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} has not come"
        time.sleep(0.005)


@pytest.mark.parametrize("on", ["0", "1"])
def test_who_listens_between_hosts_sees_token_and_payload_without_tls_only(two, on, tmp_path):
    listener = two.start(0, lambda: listen(tmp_path))
    wait_for(tmp_path / "listens")
    outcomes = two.run(broadcast_pattern, 1, PYCOLL_TLS=on, PYCOLL_TOKEN=TOKEN)
    (tmp_path / "over").touch()
    seen = two.outcome(listener).get()
    for outcome in outcomes:
        outcome.get()
    assert len(seen) > len(PATTERN) * 10_000
    assert (TOKEN.encode() in seen) == (PATTERN in seen) == (on == "0")


def test_rank_with_another_token_or_without_tls_hears_so_at_once(two):
    wrong: list[tuple[dict[str, str], str]] = [
        ({"PYCOLL_TOKEN": "another that nobody guesses"}, "their session tokens differ"),
        ({"PYCOLL_TLS": "0"}, "wants TLS, and rank 1 does not: set PYCOLL_TLS to the same"),
    ]
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": two.address(0)} | TLS
    for changed, text in wrong:
        env["MASTER_PORT"] = str(free_port())
        job = lambda: pycoll.init(timeout_s=0.4)  # noqa: E731
        pids = [two.start(0, job, **env, RANK="0"), two.start(1, job, **env | changed, RANK="1")]
        outcomes = [two.outcome(pid) for pid in pids]
        assert outcomes[0].error == "TimeoutError", outcomes[0]
        assert "ranks 1, 2 of 3 did not join" in outcomes[0].text
        assert outcomes[1].error == "UsageError" and text in outcomes[1].text, outcomes[1]
        assert outcomes[1].seconds < 0.3 and outcomes[1].fds_leaked == 0


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 2])
def test_every_collective_algorithm_protocol_and_size_equals_numpy(two, per_host):
    outcomes = two.run(every_algorithm, per_host, **TLS)
    assert [o.get() for o in outcomes] == [("tcp", i) for i in range(per_host)] * 2
    assert all(o.fds_leaked <= 1 for o in outcomes)  # NumPy opens one


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [messages, split_and_group, asynchronous_and_coalesced, every_collective, fork]
)
def test_four_hosts_do_all_else_alike(four, job):
    for outcome in four.run(job, 2, timeout_s="60", **TLS):
        outcome.get()


@pytest.mark.slow
def test_so_many_messages_that_keys_are_renewed(two):
    """Each is one record; a key is for 65,536 of them."""

    def job(comm: Comm) -> None:
        x = np.ones(1, np.float32)
        for _ in range(70_000):
            comm.all_reduce(x, "max", out=x)
        one_case(comm, "all_reduce", 100_000, 0, None)

    for outcome in two.run(job, 1, timeout_s="60", **TLS):
        outcome.get()


@pytest.mark.slow
def test_killed_rank_is_named_and_the_others_shrink(two, tmp_path):
    def job(comm: Comm, folder: Path) -> list[int]:
        x = np.ones(100_000, np.float32)
        try:
            for i in range(1_000_000):
                comm.all_reduce(x, "max")
                if i == 20:
                    (folder / f"rank{comm.rank}").write_text(str(os.getpid()))
        except pycoll.PeerDiedError as error:
            seen = ("its connection is gone", "was ended by signal 9")  # or rank 2 has said so
            assert error.rank == 3 and any(text in str(error) for text in seen)
            comm = comm.shrink()
        one_case(comm, "all_reduce", 1000, 0, None)
        with comm:
            return comm.former_ranks

    pids = two.start_ranks(job, 2, tmp_path, **TLS)
    wait_for_pids(tmp_path, 4)
    os.kill(pids[3], signal.SIGKILL)
    assert [two.outcome(pid).get() for pid in pids[:3]] == [[0, 1, 2]] * 3
    assert two.outcome(pids[3]).ended == signal.SIGKILL


@pytest.mark.slow
def test_silent_host_is_named_within_the_bound(two, tmp_path):
    pids = two.start_ranks(loop, 1, tmp_path, 100_000, PYCOLL_SILENCE_S="1.5", **TLS)
    wait_for_pids(tmp_path, 2)
    two.set_link(1, up=False)
    try:
        outcomes = [two.outcome(pid) for pid in pids]
    finally:
        two.set_link(1, up=True)
    for rank, outcome in enumerate(outcomes):
        assert (outcome.error, outcome.rank) == ("PeerDiedError", 1 - rank), outcome.text


@pytest.mark.slow
def test_rank_that_left_after_it_sent_is_no_failure_however_slow_its_bytes_are(two):
    def job(comm: Comm) -> None:
        x = np.full(300_000, comm.rank, np.float32)
        if comm.rank == 1:
            comm.send(x, 0)
        elif comm.rank == 0:
            assert (comm.recv(np.empty_like(x), 1) == 1).all()

    two.set_rate("8mbit")
    try:
        for outcome in two.run(job, 1, **TLS):
            outcome.get()
    finally:
        two.set_rate(None)


@pytest.mark.slow
@pytest.mark.parametrize("stranger", ["bytes", "slow", "token"])
def test_stranger_at_the_ports_is_refused_and_does_no_harm(two, stranger):
    """Rank 1 comes late, so that the stranger finds the ports of rank 0 and of the store open."""

    def attack() -> int:
        seen, kept = set(), []
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            for port in listening_ports(two, 0):
                with contextlib.suppress(OSError, pycoll.UsageError, pycoll.TimeoutError):
                    if stranger == "token":
                        where = (two.address(0), port)
                        seen.add(port)
                        pycoll._core.bootstrap.TcpStore(*where, "none that counts", 1, 0.05)
                    s = socket.create_connection((two.address(0), port), timeout=0.2)
                    seen.add(port)
                    s.sendall(os.urandom(5000) if stranger == "bytes" else b"\x16\x03\x01\x02")
                    kept.append(s)
            time.sleep(0.02)
        return len(seen)

    def main() -> float:
        time.sleep(0.8 * float(os.environ["RANK"]))
        with pycoll.init(timeout_s=20) as comm:
            return float(comm.all_reduce(np.ones(1000))[0])

    attacker = two.start(0, attack, **TLS)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": two.address(0), "MASTER_PORT": str(free_port())} | TLS
    pids = [two.start(rank, main, RANK=str(rank), **env) for rank in range(2)]
    outcomes = [two.outcome(pid) for pid in pids]
    assert [o.get() for o in outcomes] == [2.0, 2.0]
    assert max(o.seconds for o in outcomes) < 6
    assert two.outcome(attacker).get() >= 1


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)  # the backend may have to be compiled
def test_torch_finds_itself_through_its_own_store_and_encrypts_the_links(two, tmp_path):
    """torch's store shows its keys to who listens: what they hold opens nothing."""

    def main() -> Any:
        import torch
        import torch.distributed as dist

        import pycoll.torch

        assert pycoll.torch  # where no package is installed it is the import that registers
        try:
            dist.init_process_group("pycoll")
        except Exception:
            time.sleep(1)  # rank 0 has torch's store, in which the other reads why
            raise
        x = torch.frombuffer(bytearray(PATTERN * 1000), dtype=torch.uint8)
        dist.broadcast(x, 0)
        dist.destroy_process_group()

    def world(**changed: str) -> list[Any]:
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": two.address(0), "MASTER_PORT": str(free_port())}
        pids = [two.start(0, main, RANK="0", **env, **TLS)]
        pids.append(two.start(1, main, RANK="1", **env, **(TLS | changed)))
        return [two.outcome(pid) for pid in pids]

    found = torch_build.Torch.find()
    assert found is not None
    torch_build.find_or_build(found, torch_build.package_folder())
    listener = two.start(0, lambda: listen(tmp_path))
    wait_for(tmp_path / "listens")
    for outcome in world():
        outcome.get()
    (tmp_path / "over").touch()
    seen = two.outcome(listener).get()
    assert len(seen) > 1000 * len(PATTERN)
    assert PATTERN not in seen and TOKEN.encode() not in seen
    for outcome in world(PYCOLL_TOKEN="another that nobody guesses"):
        assert "has another PYCOLL_TOKEN than rank 0" in outcome.text, outcome
    for outcome in world(PYCOLL_TLS="0"):
        assert "rank 0 on host host0 has PYCOLL_TLS=1, and rank 1" in outcome.text, outcome


def both(comms: dict[str, Comm], nbytes: int, samples: int) -> dict[str, float]:
    """Median seconds of an all_reduce with each communicator, sample after sample in turn."""
    x = np.ones(nbytes // 4, np.float32)
    calls = 5 if nbytes <= 1 << 16 else 1
    times: dict[str, list[float]] = {name: [] for name in comms}
    for _ in range(samples):
        for name, comm in comms.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                comm.all_reduce(x, "max", out=x)
            comm.barrier()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: float(np.median(all_times)) for name, all_times in times.items()}


@pytest.mark.slow
@pytest.mark.timing
def test_encryption_costs_nothing_that_a_network_of_one_gbit_shows(two):
    """The table of docs/hosts.md: without a throttle, and at 1 Gbit/s."""

    def main() -> dict[int, dict[str, float]]:
        comms = {}
        for name, on, port in ("plain", "0", "20990"), ("tls", "1", "20991"):
            os.environ |= {"PYCOLL_TLS": on, "MASTER_PORT": port}
            comms[name] = pycoll.init(timeout_s=30)
        return {n: both(comms, n, 15) for n in (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)}

    env = {"WORLD_SIZE": "2", "MASTER_ADDR": two.address(0), "PYCOLL_TOKEN": TOKEN}
    for rate in (None, "1gbit"):
        two.set_rate(rate)
        try:
            pids = [two.start(rank, main, RANK=str(rank), **env) for rank in range(2)]
            measured = [two.outcome(pid) for pid in pids][0].get()
        finally:
            two.set_rate(None)
        for nbytes, s in measured.items():
            print(rate, nbytes, *(f"{name} {1e6 * s[name]:.0f} us" for name in s))
    assert measured[16 << 20]["tls"] < 1.1 * measured[16 << 20]["plain"]
