"""Pipelines of several schedules give the losses and gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch_ranks import on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

WIDTH, MICROBATCHES = 12, 6
ONE_STAGE = ["Schedule1F1B", "ScheduleGPipe"]
TWO_STAGES = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]


def make_layers(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num)]


def run_schedule(name: str, stages_per_rank: int) -> float:
    """Largest difference of losses and gradients from one process."""
    rank, n = dist.get_rank(), dist.get_world_size()
    num_stages = n * stages_per_rank
    ours, alone = make_layers(num_stages), nn.Sequential(*make_layers(num_stages))
    stages = [
        pipelining.PipelineStage(ours[i], i, num_stages, torch.device("cpu"))
        for i in range(rank, num_stages, n)
    ]
    schedule = getattr(pipelining, name)(
        stages[0] if stages_per_rank == 1 else stages,
        MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        scale_grads=True,
    )
    x, y = torch.randn(2, MICROBATCHES * 2, WIDTH, generator=torch.Generator().manual_seed(1))
    losses: list[torch.Tensor] = []
    inputs = (x,) if rank == 0 else ()
    schedule.step(*inputs, **({"target": y, "losses": losses} if rank == n - 1 else {}))
    expected = nn.functional.mse_loss(alone(x), y)
    expected.backward()
    worst = abs(torch.stack(losses).mean().item() - expected.item()) if losses else 0.0
    for i in range(rank, num_stages, n):
        pairs = zip(ours[i].parameters(), alone[i].parameters(), strict=True)
        worst = max(worst, *((a.grad - b.grad).abs().max().item() for a, b in pairs))
    return worst


@on_ranks(2, 3)
def test_schedule_gives_the_gradients_of_one_process(rank, n):
    off = {name: run_schedule(name, 1) for name in ONE_STAGE}
    off |= {name: run_schedule(name, 2) for name in TWO_STAGES}
    assert max(off.values()) < 1e-6, off
