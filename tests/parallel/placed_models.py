"""Models whose modules are placed on ranks."""

from __future__ import annotations

import random

import torch
from torch import nn


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


class Mixed(nn.Module):
    """Results with several tensors and numbers, a parameter and a buffer between modules, one
    module called twice, and one that another module shares its weight with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"lstm": nn.LSTM(6, 6, batch_first=True)})
        self.norm = nn.BatchNorm1d(6)
        self.twice = nn.Linear(6, 6)
        self.head, self.tied = nn.Linear(6, 5), nn.Linear(6, 5)
        self.tied.weight = self.head.weight
        self.gain = nn.Parameter(torch.rand(6))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x, extra=None):
        x = x * 2 + self.shift
        if extra is not None:
            x = x + extra
        y, (h, _) = self.inner["lstm"](x[:, None].expand(-1, 3, -1))
        width = y.shape[1]
        a = self.twice(self.norm(x)) * self.gain
        if self.training:
            a = a * 1.5
        b = self.twice(torch.tanh(a) / width) + h[0] * self.gain
        return {"a": self.head(b), "b": self.tied(y[:, -1])}


class Web(nn.Module):
    """Random calls: each module takes the sum of some earlier results."""

    def __init__(self, seed: int, count: int = 9) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))
        self.inputs = [
            draw.sample(range(i + 1), min(i + 1, draw.choice([1, 2]))) for i in range(count)
        ]
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        made = [x]
        for part, inputs in zip(self.parts, self.inputs, strict=True):
            made.append(torch.tanh(part(sum(made[i] for i in inputs))))
        return self.head(sum(made[-3:]))
