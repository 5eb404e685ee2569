"""Batch normalisation on replicas is that of one process, whatever their batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from worlds import assert_equal_one_process, fit  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

BATCHES = [9, 7, 3, 1]  # 3/3/3, 3/2/2, 1/1/1, 1/0/0


def make() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def train(comm, sizes, **options):
    random = torch.Generator().manual_seed(4)
    data = [
        (torch.randn(n, 2, 5, 5, generator=random) * 3 + 5, torch.arange(n) % 3) for n in BATCHES
    ]
    statistics = lambda model: dict(model.named_buffers())  # noqa: E731
    loss = functional.cross_entropy
    return fit(comm, sizes, make, data, loss=loss, microbatches=1, also=statistics, **options)


def test_uneven_and_empty_batches_equal_one_process():
    assert_equal_one_process(train, [({"dp": 3}, {})])
