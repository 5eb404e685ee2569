"""Which processes may join a job of several hosts; other processes are refused."""

from __future__ import annotations

import os
import socket
import time

import numpy as np
import pytest
from namespaces import free_port, values

import pycoll
from pycoll import torch_build

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


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
