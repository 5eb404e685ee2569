"""Training with a rank that dies, stops or brings another shape: the other ranks name it."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import beyond_gloo, on_ranks, run_group

import pycoll
import pycoll.torch

pytestmark = [pytest.mark.torch, pytest.mark.ranks, beyond_gloo("Gloo names no rank")]

N, DEADLINE_S = 3, 2.0


def train(victim: int, number: int, clock: Path) -> tuple[str, str, float]:
    """Steps until an error comes: its type, text, and seconds since the victim's signal."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 200), nn.Linear(200, 1)))
    pycoll.torch.set_timeout(datetime.timedelta(seconds=DEADLINE_S))
    try:
        for step in range(1_000_000):
            if dist.get_rank() == victim and step == 5:
                clock.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), number)
            model(torch.ones(4, 50)).sum().backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - float(clock.read_text())
    raise AssertionError("the loop ended")


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rank_that_is_killed_or_stopped_is_named_by_the_others(victim, number, tmp_path):
    pid = tmp_path / "pid"

    def work(rank: int, n: int) -> tuple[str, str, float]:
        if rank == victim:
            pid.write_text(str(os.getpid()))
        try:
            return train(victim, number, tmp_path / "clock")
        finally:  # so that a stopped rank ends, too
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)

    outcomes = run_group(work, N, return_errors=True)
    assert isinstance(outcomes.pop(victim), pycoll.PeerDiedError)
    for name, text, seconds in outcomes:
        assert name == "DistBackendError"
        assert f"rank {victim}" in text and "all_reduce" in text, text
        if number == signal.SIGKILL:
            assert re.search(rf"rank {victim} .*(SIGKILL|killed|ended|died)", text), text
        assert seconds < DEADLINE_S + 10, text
        assert "Timed out" not in text or "(10401,)" in text, text
    timed_out = any("Timed out" in text for _, text, _ in outcomes)
    assert timed_out == (number == signal.SIGSTOP)


@on_ranks(N)
def test_gradient_of_another_shape_is_named_with_both_shapes(rank, n):
    """The hook of one rank sends more, which DDP itself does not compare."""

    def hook(_, bucket):
        sent = torch.cat([bucket.buffer(), torch.zeros(int(rank == 1))])
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: done.value()[0][: bucket.buffer().numel()])

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1") as error:
        # A rank that is still in DDP's first broadcast learns of the mismatch there.
        model = DistributedDataParallel(nn.Linear(6, 7))
        model.register_comm_hook(None, hook)
        for _ in range(2):
            model(torch.ones(4, 6)).sum().backward()
    assert "(49,)" in str(error.value) and "(50,)" in str(error.value)
    assert time.monotonic() - begin < 10
