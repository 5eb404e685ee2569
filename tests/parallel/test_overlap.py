"""Gradients of a pipeline are reduced over the replicas while its ranks still compute."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

DIM, PAUSE_S = 16, 0.2


class SlowBackward(nn.Linear):
    """Takes its time to pass a gradient on."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(PAUSE_S))
        return y


class Blocks(nn.Module):
    """The first block is the last one whose gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (SlowBackward, nn.Linear, nn.Linear, nn.Linear)
        self.blocks = nn.ModuleList(kind(DIM, DIM) for kind in kinds)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def one_step(comm, schedule: str, zero: int):
    """The stage, the end of its rank's compute, and the ends of its reductions."""
    torch.set_num_threads(1)
    mesh = pc.mesh(pp=2, dp=2, comm=comm)
    mesh.ledger.spans = []
    block = (DIM * DIM + DIM) * 4
    model = pc.parallelize(
        Blocks(), mesh, pp="blocks", schedule=schedule, zero=zero, bucket_mb=block / 2**20
    )
    x = torch.randn(4, DIM)
    model.step(x, x, loss=lambda out, y: (out.sum(), out.numel()), microbatches=2)
    reduced = [
        record["finished_ns"]
        for record in mesh.comm("dp").flight_record()
        if record["nbytes"] in (block, block // 2) and "reduce" in record["collective"]
    ]
    computed = [end for _, track, _, end in mesh.ledger.spans if track == "compute"]
    return mesh.rank("pp"), max(computed), reduced


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("zbv", 0), ("interleaved_1f1b", 2)])
def test_gradients_are_reduced_while_a_rank_still_computes(schedule, zero):
    for stage, computed, reduced in run_ranks(one_step, 4, schedule, zero):
        assert len(reduced) == 2  # each of its blocks once, however many microbatches
        assert stage > 0 or min(reduced) < computed
