"""The small GPT of these tests, and its training on one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny_gpt import GPT
from torch import nn
from torch.nn import functional as F

import pycoll


def gpt(make: Callable = GPT, depth: int = 4, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab": 11, "heads": 2, "hidden": 32, "context": 16}
    return make(depth=depth, tie=tied, drop=0.0, **sizes).double()


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def batch(samples: int, length: int = 6, vocab: int = 11, seed: int = 1) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_alone(model: nn.Module, batches: list, lr: float = 1e-2) -> list[float]:
    """Trains on one process, in place; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        total, count = loss_sum(model(x), y)
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses


def ranks(fn: Callable, n: int, *args: object, **kwargs: object) -> list:
    return pycoll.run_ranks(fn, n, *args, timeout_s=60, **kwargs)
