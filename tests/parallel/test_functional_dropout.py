"""Dropout as a function: every mesh drops what one process drops."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt import batches
from torch import nn
from torch.nn import functional
from worlds import assert_equal_one_process, fit

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

PLAN = {"*.qkv": "qkv", "*.up": "col", "*.out|*.down": "row"}
DIM, VOCAB = 16, 29


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x_BTD):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.2 * self.training, is_causal=True
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + functional.dropout(out, 0.1, self.training)
        hidden = functional.dropout(functional.gelu(self.up(x_BTD)), 0.1, self.training)
        return x_BTD + functional.dropout(self.down(hidden), 0.1, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = functional.dropout(self.token(tokens), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(functional.dropout2d(x, 0.1, self.training))


def train(comm, sizes, **options):
    return fit(comm, sizes, Net, batches(4, 7), tp=PLAN, pp="blocks", **options)


def test_functions_drop_what_they_drop_on_one_process():
    assert_equal_one_process(
        train,
        [
            ({"dp": 3}, {"recompute": True}),
            ({"tp": 2}, {"sequence_parallel": True}),
            ({"tp": 2, "pp": 2}, {"recompute": True}),
            ({"pp": 2}, {"schedule": "zb1p", "zero": 3}),
        ],
    )


def test_masks_differ_between_calls_layers_and_steps_and_scale_what_is_kept():
    torch.manual_seed(0)
    seen = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            seen.extend(functional.dropout(torch.ones_like(x), 0.25) for _ in range(2))
            return x * self.scale

    def work(comm):
        model = pc.parallelize(Model(), pc.mesh(comm=comm))
        for _ in range(2):
            model.step(torch.ones(500, 4), torch.ones(500), loss=lambda x, y: (x.sum(), len(y)))
        kept = torch.tensor([0.0, 1 / 0.75])
        assert all(torch.allclose(mask.unique(), kept) for mask in seen)
        assert all(abs(float((mask > 0).float().mean()) - 0.75) < 0.05 for mask in seen)
        assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])

    run_ranks(work, 1)


def train_layer_of_torch(comm, sizes):
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    layer = lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True))  # noqa: E731
    loss = lambda out, y: (out.square().sum(), y.numel())  # noqa: E731
    return fit(comm, sizes, layer, [(x, x)] * 2, loss=loss, microbatches=1)


def test_attention_of_torch_drops_by_place():
    assert_equal_one_process(train_layer_of_torch, [({"dp": 3}, {})])


def test_what_cannot_be_keyed_is_refused_by_name():
    def work(comm):
        mesh = pc.mesh(comm=comm)
        with pytest.raises(UsageError, match=r"layer '0': the dropout within LSTM cannot be keyed"):
            pc.parallelize(nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.1)), mesh)
        model = pc.parallelize(nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1)), mesh)
        with pytest.raises(UsageError, match=r"layer '1': alpha_dropout cannot be keyed by place"):
            model.step(torch.ones(2, 4), torch.ones(2, 4), loss=lambda x, y: (x.sum(), 1))

    run_ranks(work, 1)
