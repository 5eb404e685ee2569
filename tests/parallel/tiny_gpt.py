"""A plain GPT, and its training on a mesh."""

from __future__ import annotations

import torch
from mesh_cases import fit
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

PLAN = {
    "*.qkv": "qkv",
    "*.up": "col",
    "*.out|*.down": "row",
    "token|head": "vocab",
    "*.attention_drop": "inside:1",
}


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(
        self, dim: int, heads: int, drop: float, hidden: int, fused=False, experts=0
    ) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if experts:
            self.router = nn.Linear(dim, experts)
            self.experts = pc.Experts(MLP(dim, hidden // 2) for _ in range(experts))
        else:
            self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.attention_drop, self.drop = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x_BTD):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        )
        if self.fused:
            p = self.attention_drop.p * self.training
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            mixed = self.attend(q, k, v)
        x_BTD = x_BTD + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        normed = self.norm_2(x_BTD)
        if hasattr(self, "experts"):
            return x_BTD + self.drop(self.mix(normed.flatten(0, 1)).view_as(x_BTD))
        return x_BTD + self.drop(self.down(functional.gelu(self.up(normed))))

    def mix(self, tokens_ND):
        weights, indices = self.router(tokens_ND).softmax(-1).topk(2)
        return self.experts(tokens_ND, indices, weights)

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.attention_drop(scores.masked_fill(future, -torch.inf).softmax(-1)) @ v


class GPT(nn.Module):
    def __init__(
        self, vocab=29, dim=16, depth=4, heads=8, drop=0.1, context=8, hidden=None, tie=False,
        fused=False, experts=0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(
            Block(dim, heads, drop, hidden or 4 * dim, fused, experts if i % 2 else 0)
            for i in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        if tie:
            self.head.weight = self.token.weight

    def forward(self, tokens_BT):
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.token(tokens_BT) + self.place(places))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Blocks(nn.Module):
    """Blocks without dropout, and nothing before or after them."""

    def __init__(self, depth: int, dim=16, heads=8, fused=False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads, 0.0, 4 * dim, fused) for _ in range(depth))

    def forward(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


def batches(steps: int, size: int, context=8, vocab=29):
    """Identical on every rank; some targets are -100, which counts nothing."""
    random = torch.Generator().manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(vocab, (size, context + 1), generator=random)
        targets = tokens[:, 1:].clone()
        targets[0, : context // 2] = -100
        yield tokens[:, :-1], targets


def train(
    comm, sizes: dict, steps=4, batch=8, gpt: dict | None = None, tp: dict | None = None, **options
) -> tuple:
    """Losses, norms and weights after some steps of AdamW."""
    data = batches(steps, batch, (gpt or {}).get("context", 8))
    return fit(comm, sizes, lambda: GPT(**(gpt or {})), data, tp=tp or PLAN, pp="blocks", **options)
