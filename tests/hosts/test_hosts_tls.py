"""Links between hosts with PYCOLL_TLS=1: the same results, and no listener can read them."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_jobs import (
    TLS,
    asynchronous_and_coalesced,
    every_algorithm,
    every_collective,
    fork,
    messages,
    one_case,
    split_and_group,
)
from namespaces import TOKEN, free_port, values

import pycoll
from pycoll import torch_build

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator
PATTERN = b"what no other program may read ."


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
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} has not come"
        time.sleep(0.005)


@pytest.mark.parametrize("on", ["0", "1"])
def test_listener_sees_the_payload_without_tls_only_and_the_token_never(two, on, tmp_path):
    listener = two.start(0, lambda: listen(tmp_path))
    wait_for(tmp_path / "listens")
    outcomes = two.run(broadcast_pattern, 1, PYCOLL_TLS=on)
    (tmp_path / "over").touch()
    seen = two.outcome(listener).get()
    values(outcomes)
    assert len(seen) > len(PATTERN) * 10_000
    assert TOKEN.encode() not in seen
    assert (PATTERN in seen) == (on == "0")


def test_rank_with_another_token_or_without_tls_is_refused_at_once(two):
    wrong: list[tuple[dict[str, str], str]] = [
        ({"PYCOLL_TOKEN": "another token, also long"}, "their session tokens differ"),
        ({"PYCOLL_TLS": "0"}, "wants TLS, and rank 1 does not: set PYCOLL_TLS"),
    ]
    worlds = []
    for changed, _ in wrong:
        env = TLS | {"WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}
        job = lambda: pycoll.init(timeout_s=2)  # noqa: E731
        pids = two.start_world(job, [0], **env)
        env["MASTER_ADDR"] = two.address(0)
        worlds.append([*pids, two.start(1, job, **env | changed, RANK="1")])
    for pids, (_, text) in zip(worlds, wrong, strict=True):
        waits, refused = two.outcomes(pids)
        assert waits.error == "TimeoutError", waits
        assert "ranks 1, 2 of 3 did not join" in waits.text
        # Not a TimeoutError: it does not wait.
        assert refused.error == "UsageError" and text in refused.text, refused
        assert refused.fds_leaked == 0


@pytest.mark.slow
def test_two_hosts_run_every_algorithm(two):
    (places,) = two.run_jobs([every_algorithm], 2, **TLS)
    assert places == (("tcp", 0), ("tcp", 1)) * 2


@pytest.mark.slow
def test_four_hosts_run_every_kind_of_operation(four):
    jobs = [messages, split_and_group, asynchronous_and_coalesced, every_collective, fork]
    four.run_jobs(jobs, 2, timeout_s="60", **TLS)


@pytest.mark.slow
def test_so_many_messages_that_keys_are_renewed(two):
    """Each is one record; a key is for 65,536 of them."""

    def job(comm: Comm) -> None:
        x = np.ones(1, np.float32)
        for _ in range(70_000):
            comm.all_reduce(x, "max", out=x)
        one_case(comm, "all_reduce", 100_000, 0, None)

    two.run_jobs([job], timeout_s="60", **TLS)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)  # the backend may have to be compiled
def test_torch_finds_itself_through_its_own_store_and_encrypts_the_links(two, tmp_path):
    """A listener can read the keys of torch's store: what they hold opens nothing."""

    torch = pytest.importorskip("torch")  # here, so that the ranks need not import it
    import torch.distributed as dist

    import pycoll.torch  # noqa: F401  registers the backend where no package is installed

    def main() -> Any:
        try:
            dist.init_process_group("pycoll")
        except Exception:
            time.sleep(1)  # rank 0 has torch's store, in which the other reads why
            raise
        x = torch.frombuffer(bytearray(PATTERN * 1000), dtype=torch.uint8)
        dist.broadcast(x, 0)
        dist.destroy_process_group()

    def world(**changed: str) -> list[Any]:
        env = TLS | {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
        pids = two.start_world(main, [0], **env)
        env["MASTER_ADDR"] = two.address(0)
        return two.outcomes([*pids, two.start(1, main, **env | changed, RANK="1")])

    found = torch_build.Torch.find()
    assert found is not None
    torch_build.find_or_build(found, torch_build.package_folder())
    listener = two.start(0, lambda: listen(tmp_path))
    wait_for(tmp_path / "listens")
    values(world())
    (tmp_path / "over").touch()
    seen = two.outcome(listener).get()
    assert len(seen) > 1000 * len(PATTERN)
    assert PATTERN not in seen and TOKEN.encode() not in seen
    for outcome in world(PYCOLL_TOKEN="another token, also long"):
        assert "has another PYCOLL_TOKEN than rank 0" in outcome.text, outcome
    for outcome in world(PYCOLL_TLS="0"):
        assert "rank 0 on host host0 has PYCOLL_TLS=1, and rank 1" in outcome.text, outcome
