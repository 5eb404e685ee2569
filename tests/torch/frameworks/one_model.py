"""What the framework scripts train, and the same by hand in one process."""

from __future__ import annotations

import torch
from torch import nn

STEPS, BATCH, LEARNING_RATE = 20, 12, 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def make_data() -> torch.utils.data.TensorDataset:
    x = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1)).double()
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())


def train_alone() -> nn.Module:
    """All of the data once, in order, BATCH samples at a time."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for x, y in torch.utils.data.DataLoader(make_data(), BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


class InStrides(torch.utils.data.Sampler):
    """Sample i of a global batch goes to rank i % n: what every rank brings adds up to it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.indices = range(rank, STEPS * BATCH, num_ranks)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
