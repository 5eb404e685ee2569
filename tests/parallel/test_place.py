"""Modules placed on ranks by name: towers that run at the same time, equal to one process."""

from __future__ import annotations

import torch
from mesh_cases import assert_equal_one_process, fit
from torch import nn

PLACE = {"tower_a": 0, "tower_b": 1}


class Towers(nn.Module):
    """Two towers between a stem and a head."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.tower_a = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 8))
        self.tower_b = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 4))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        return self.head(torch.cat([self.tower_a(h), self.tower_b(h)], -1))


def batches(count: int = 3, size: int = 7):
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 6, generator=draw, dtype=torch.float64),
            torch.randint(5, (size,), generator=draw),
        )
        for _ in range(count)
    ]


def train(comm, sizes, *, drop=0.0, **options):
    if not sizes:
        options.pop("place", None)
    return fit(comm, sizes, lambda: Towers(drop), batches(), **options)


def test_placed_models_equal_one_process():
    dropping = {"drop": 0.3}
    assert_equal_one_process(
        train,
        [
            ({"pp": 2}, {"place": PLACE}),
            ({"pp": 2}, {"place": {"tower_a": 1, "head": 1}, "microbatches": 5}, dropping),
            ({"pp": 2, "dp": 2}, {"place": PLACE}, dropping),
            ({"pp": 2, "dp": 2}, {"place": PLACE, "zero": 2}),
        ],
    )
