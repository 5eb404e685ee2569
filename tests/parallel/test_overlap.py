"""Gradients are reduced over the replicas while ranks still compute."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from worlds import in_one_world

from pycoll import parallel as pc

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

DIM, PAUSE_S = 16, 0.2
computed_ns: list[int] = []  # when the slow backward was done


class SlowBackward(nn.Linear):
    """Pauses before it passes its gradient on."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.pause)
        return y

    def pause(self, gradient) -> None:
        time.sleep(PAUSE_S)
        computed_ns.append(time.monotonic_ns())


class Blocks(nn.Module):
    """The gradients of the first block are the last ones."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (SlowBackward, nn.Linear, nn.Linear, nn.Linear)
        self.blocks = nn.ModuleList(kind(DIM, DIM) for kind in kinds)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def one_step(comm, sizes: dict, schedule: str, zero: int):
    """The number of reductions, and how many ended while this rank still computed."""
    mesh = pc.mesh(**sizes, comm=comm)
    block = (DIM * DIM + DIM) * 4
    model = pc.parallelize(
        Blocks(), mesh, pp="blocks", schedule=schedule, zero=zero, bucket_mb=block / 2**20
    )
    x = torch.randn(4, DIM)
    computed_ns.clear()
    model.step(x, x, loss=lambda out, y: (out.sum(), out.numel()), microbatches=2)
    reduced = [
        record["finished_ns"]
        for record in mesh.comm("dp").flight_record()
        if record["nbytes"] in (block, block // 2) and "reduce" in record["collective"]
    ]
    end = max(computed_ns, default=0)
    return mesh.rank("pp"), len(reduced), sum(ns < end for ns in reduced)


def test_gradients_are_reduced_while_a_rank_still_computes():
    stages = {"pp": 2, "dp": 2}
    cases = [
        (2, {"dp": 2}, "1f1b", 0),
        (2, {"dp": 2}, "1f1b", 1),
        (4, stages, "1f1b", 0),
        (4, stages, "zbv", 0),
        (4, stages, "interleaved_1f1b", 2),
    ]
    for case, found in zip(cases, in_one_world(one_step, cases), strict=True):
        for stage, reduced, early in found:
            # Each of its blocks once, however many microbatches. Stage 0 has the slow block.
            assert reduced == 8 // case[0], case
            assert stage > 0 or early > 0, case
