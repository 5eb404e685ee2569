"""Training with a rank that dies, stops or brings another shape: the others learn who, in time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import BACKEND, run_with_group  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import pycoll  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.ranks,
    pytest.mark.skipif(BACKEND == "gloo", reason="Gloo names no rank"),
]

N, DEADLINE_S = 3, 3.0


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
    def work():
        return train(victim, lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "clock")

    outcomes = run_with_group(work, N, group_timeout_s=60, return_errors=True)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, pycoll.PeerDiedError)
            continue
        name, text, seconds = outcome
        assert name == "DistBackendError"
        assert re.search(rf"rank {victim} .*(SIGKILL|killed|ended|died)", text), text
        assert "all_reduce" in text
        assert seconds < 2, text


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_rank_is_named_by_the_others_at_the_deadline(victim, tmp_path):
    pids = tmp_path / "pid"

    def work():
        if dist.get_rank() == victim:
            pids.write_text(str(os.getpid()))
        try:
            return train(victim, lambda: os.kill(os.getpid(), signal.SIGSTOP), tmp_path / "clock")
        finally:  # so that this test ends too: whoever is first
            os.kill(int(pids.read_text()), signal.SIGKILL)

    outcomes = run_with_group(work, N, group_timeout_s=DEADLINE_S, return_errors=True)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert any("Timed out" in text for _, text, _ in survivors)
    for name, text, seconds in survivors:
        assert name == "DistBackendError"
        assert f"rank {victim}" in text, text
        assert "all_reduce" in text
        assert seconds < DEADLINE_S + 2
        if "Timed out" in text:
            assert "(10401,)" in text, text


def test_gradient_of_another_shape_is_named_with_both_shapes():
    """Ranks whose models differ after DDP has looked at them: a hook sends what it likes."""

    def work() -> tuple[str, str, float]:
        def hook(_, bucket):
            extra = int(dist.get_rank() == 1)
            sent = torch.cat([bucket.buffer(), torch.zeros(extra)])
            future = dist.all_reduce(sent, async_op=True).get_future()
            return future.then(lambda done: done.value()[0][: bucket.buffer().numel()])

        model = DistributedDataParallel(nn.Linear(6, 7))
        model.register_comm_hook(None, hook)
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            for _ in range(2):
                model(torch.ones(4, 6)).sum().backward()
        return type(error.value).__name__, str(error.value), time.monotonic() - begin

    for name, text, seconds in run_with_group(work, N, group_timeout_s=60):
        assert name in ("DistBackendError", "RuntimeError")
        assert "(49,)" in text and "(50,)" in text, text
        assert "rank 1" in text
        assert seconds < 5


def test_models_of_different_shape_are_refused_by_ddp_itself():
    """It compares with rank 0's, which therefore sees nothing wrong."""

    def work() -> None:
        DistributedDataParallel(nn.Linear(6 + dist.get_rank(), 7))

    _, error = run_with_group(work, 2, return_errors=True)
    assert "appears not to match sizes" in str(error)


def test_another_collective_on_one_rank_is_named():
    def work() -> str:
        x = torch.ones(5, 2)
        with pytest.raises(RuntimeError) as error:
            if dist.get_rank() == 1:
                dist.broadcast(x, src=0)
            else:
                dist.all_reduce(x)
        return str(error.value)

    for text in run_with_group(work, N):
        assert "all_reduce" in text and "broadcast" in text and "rank 1" in text, text
