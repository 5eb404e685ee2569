"""Models for tests: a small GPT as people write it, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import pycoll


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / (d // self.heads) ** 0.5
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        x = x + self.out(torch.einsum("bhqk,bkhc->bqhc", weights, v).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, depth: int = 4, tied: bool = False, vocab: int = 11, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        t = tokens.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.embed(tokens) + self.position(torch.arange(t))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def gpt(**options: object) -> GPT:
    torch.manual_seed(0)
    return GPT(**options).double()  # type: ignore[arg-type]


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def batch(samples: int, length: int = 6, vocab: int = 11, seed: int = 1) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_alone(model: nn.Module, batches: list, lr: float = 1e-2) -> list[float]:
    """One process: the losses; the weights are left in the model."""
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
    return pycoll.run_ranks(fn, n, *args, timeout_s=20, **kwargs)
