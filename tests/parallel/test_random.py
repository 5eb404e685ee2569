"""Random numbers by place: initial weights and dropout masks are identical on every mesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mesh_cases import assert_equal_one_process, fit
from tiny_gpt import GPT, Block, batches
from torch import nn
from torch.nn import functional

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.core import random

PLAN = {"*.qkv": "qkv", "*.up": "col", "*.out|*.down": "row"}
DIM, VOCAB = 16, 29


def test_words_of_a_part_are_those_of_the_whole():
    whole = random.words("a stream", 0, 1000)
    for start, count in ((0, 1), (1, 7), (4, 4), (997, 3), (500, 0)):
        assert np.array_equal(random.words("a stream", start, count), whole[start : start + count])
    assert not np.array_equal(random.words("another", 0, 1000), whole)


def test_numbers_are_distributed_as_they_say():
    numbers = random.normal("n", (200_000,), mean=1.0, std=2.0)
    assert numbers.mean() == pytest.approx(1.0, abs=0.02)
    assert numbers.std() == pytest.approx(2.0, abs=0.02)
    numbers = random.uniform("u", (200_000,), -1.0, 3.0)
    assert -1 < numbers.min() < -0.999 and 2.999 < numbers.max() < 3
    for drop in (0.0, 0.1, 0.5, 1.0):
        kept = random.keep_mask("m", 0, 100_000, drop, torch.device("cpu")).double().mean()
        assert kept == pytest.approx(1 - drop, abs=0.01)


class Initialised(nn.Module):
    def __init__(self, more: bool) -> None:
        super().__init__()
        if more:
            self.more = nn.Linear(3, 3)
        self.linear, self.embedding = nn.Linear(4, 5), nn.Embedding(7, 4, padding_idx=2)
        self.list = nn.ModuleList(nn.Conv2d(2, 3, 3) for _ in range(2))
        self.made = nn.Parameter(torch.randn(3) * 0.1)
        nn.init.trunc_normal_(self.linear.weight, std=0.5, a=-0.7, b=0.7)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embedding.weight


def test_weights_depend_on_names_and_seed_alone():
    def make(more: bool, seed: int) -> dict:
        with pc.keyed_init(seed=seed):
            net = Initialised(more)
        return {name: p.detach() for name, p in net.named_parameters()}

    one, other, third = make(False, 0), make(True, 0), make(False, 1)
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
        assert not torch.equal(weight, third[name]), name
    assert not one["embedding.weight"][2].any()  # the padding stays zero
    assert one["linear.weight"].abs().max() <= 0.7
    assert not torch.equal(one["list.0.weight"], one["list.1.weight"])


def test_torch_is_as_it_was_after_keyed_init():
    kept = nn.init.trunc_normal_
    with pytest.raises(ValueError), pc.keyed_init():
        raise ValueError
    assert nn.init.trunc_normal_ is kept
    torch.manual_seed(0)
    first = nn.Linear(3, 3).weight
    torch.manual_seed(0)
    assert torch.equal(first, nn.Linear(3, 3).weight)


class Functional(Block):
    """Drops by functions: several times in one module."""

    def forward(self, x_BTD):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.2 * self.training, is_causal=True
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + functional.dropout(out, 0.1, self.training)
        hidden = functional.dropout(
            functional.gelu(self.up(self.norm_2(x_BTD))), 0.1, self.training
        )
        return x_BTD + functional.dropout(self.down(hidden), 0.1, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Functional(DIM, 4, 0.0, 48) for _ in range(2))
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
    random = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 8, generator=random, dtype=torch.float64)
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


def evaluated(comm, sizes, microbatches=1, **options):
    """Losses of evaluations while the model drops, before and after a step."""
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(depth=2)
    model = pc.parallelize(model, mesh, pp="blocks", **options)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for x, y in pc.shard(batches(2, 6), mesh):
        found.append(model.evaluate(x, y, loss=pc.cross_entropy, microbatches=microbatches))
        found.append(model.step(x, y, loss=pc.cross_entropy).loss)
        optimizer.step()
    return found


def test_evaluation_of_a_model_that_drops_is_that_of_one_process():
    cases = [({"dp": 2}, {"microbatches": 2}), ({"dp": 3}, {}), ({"pp": 2}, {"microbatches": 2})]
    assert_equal_one_process(evaluated, cases)
