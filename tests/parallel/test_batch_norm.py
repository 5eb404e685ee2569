"""Batch normalisation on replicas is that of one process, whatever their batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

BATCHES = [9, 7, 3, 1]  # 3/3/3, 3/2/2, 1/1/1, 1/0/0


def train(comm):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(comm=comm)
    with pc.keyed_init(mesh, seed=2):
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        )
    model = pc.parallelize(model, mesh)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    random = torch.Generator().manual_seed(4)
    data = [
        (torch.randn(n, 2, 5, 5, generator=random) * 3 + 5, torch.arange(n) % 3) for n in BATCHES
    ]
    losses = []
    for x, y in pc.shard(data, mesh):
        losses.append(model.step(x, y, loss=functional.cross_entropy).loss)
        optimizer.step()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return losses, pc.whole_weights(model) | statistics


def test_uneven_and_empty_batches_equal_one_process():
    losses, weights = run_ranks(train, 1)[0]
    for got in run_ranks(train, 3):
        assert all(abs(a - b) <= 1e-10 for a, b in zip(losses, got[0], strict=True))
        for name, weight in weights.items():
            assert (weight - got[1][name]).abs().max() <= 1e-10, name
