"""Training with a rank that dies, stops or brings another shape: the other ranks name it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_ranks import beyond_gloo, on_ranks, run_group  # noqa: E402

import pycoll  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks, beyond_gloo("Gloo names no rank")]

N, DEADLINE_S = 3, 2.0


def train(victim: int, misfortune, clock: Path) -> tuple[str, str, float]:
    """Steps until an error comes: its type, text, and seconds since the misfortune."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 200), nn.Linear(200, 1)))
    try:
        for step in range(1_000_000):
            if dist.get_rank() == victim and step == 5:
                clock.write_text(repr(time.monotonic()))
                misfortune()
            model(torch.ones(4, 50)).sum().backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - float(clock.read_text())
    raise AssertionError("the loop ended")


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_is_named_by_the_others_at_once(victim, tmp_path):
    def work(rank, n):
        return train(victim, lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "clock")

    outcomes = run_group(work, N, return_errors=True)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, pycoll.PeerDiedError)
            continue
        name, text, seconds = outcome
        assert name == "DistBackendError"
        assert re.search(rf"rank {victim} .*(SIGKILL|killed|ended|died)", text), text
        assert "all_reduce" in text
        assert seconds < 10, text  # the timeout is 30 s


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_rank_is_named_by_the_others_at_the_deadline(victim, tmp_path):
    pids = tmp_path / "pid"

    def work(rank, n):
        if rank == victim:
            pids.write_text(str(os.getpid()))
        try:
            return train(victim, lambda: os.kill(os.getpid(), signal.SIGSTOP), tmp_path / "clock")
        finally:  # so that this test ends, too
            os.kill(int(pids.read_text()), signal.SIGKILL)

    outcomes = run_group(work, N, timeout_s=DEADLINE_S, return_errors=True)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert any("Timed out" in text for _, text, _ in survivors)
    for name, text, seconds in survivors:
        assert name == "DistBackendError"
        assert f"rank {victim}" in text, text
        assert "all_reduce" in text
        assert seconds < DEADLINE_S + 10
        if "Timed out" in text:
            assert "(10401,)" in text, text


@on_ranks(N)
def test_gradient_of_another_shape_is_named_with_both_shapes(rank, n):
    """The hook of one rank sends more, which DDP itself does not compare."""

    def hook(_, bucket):
        sent = torch.cat([bucket.buffer(), torch.zeros(int(rank == 1))])
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: done.value()[0][: bucket.buffer().numel()])

    model = DistributedDataParallel(nn.Linear(6, 7))
    model.register_comm_hook(None, hook)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1") as error:
        for _ in range(2):
            model(torch.ones(4, 6)).sum().backward()
    assert "(49,)" in str(error.value) and "(50,)" in str(error.value)
    assert time.monotonic() - begin < 10


@on_ranks(2)
def test_models_of_different_shape_are_refused_by_ddp_itself(rank, n):
    """It compares with rank 0's, which therefore sees nothing wrong."""
    if rank == 0:
        DistributedDataParallel(nn.Linear(6, 7))
    else:
        with pytest.raises(RuntimeError, match="appears not to match sizes"):
            DistributedDataParallel(nn.Linear(7, 7))
