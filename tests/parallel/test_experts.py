"""Expert parallel: experts are spread over ranks, tokens travel, results equal one process."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import (
    assert_equal_one_process,
    assert_refused,
    in_one_world,
    one_process,
)
from tiny_gpt import GPT, MLP, PLAN
from torch import nn
from torch.nn import functional

from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.parallel.core.object_collectives import gather_objects

DIM, ITEM = 8, 8


class Mixture(nn.Module):
    """The first feature of a token chooses its experts."""

    def __init__(self, num_experts: int, each: int = 2) -> None:
        super().__init__()
        self.each = each
        self.enter = nn.Linear(DIM, DIM)
        self.experts = pc.Experts(MLP(DIM, 2 * DIM) for _ in range(num_experts))

    def forward(self, x):
        asked = x[:, :1].long().abs() + torch.arange(self.each)
        weights = torch.linspace(1, 2, self.each).expand(len(x), -1)
        return self.experts(self.enter(x), asked % 4, weights)


def by_hand(experts, tokens, indices, weights):
    rows = [
        sum(w * experts[int(i)](token) for i, w in zip(asked, share, strict=True))
        for token, asked, share in zip(tokens, indices, weights, strict=True)
    ]
    return torch.stack(rows)


def test_experts_on_one_process_are_a_loop_and_need_no_mesh():
    torch.manual_seed(0)
    experts = pc.Experts(MLP(DIM, 4) for _ in range(3))
    tokens = torch.randn(7, DIM, requires_grad=True)
    weights, indices = torch.rand(7, 3).topk(2)
    weights.requires_grad_()
    inputs = [tokens, weights, *experts.parameters()]
    made, expected = (f(experts, tokens, indices, weights) for f in (pc.Experts.forward, by_hand))
    assert torch.allclose(made, expected, atol=1e-6)
    gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (made, expected)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert experts(tokens[:0], indices[:0], weights[:0]).shape == (0, DIM)
    with pytest.raises(UsageError, match="a token chooses expert 3, there are 3"):
        experts(tokens, indices + 1, weights)
    with pytest.raises(UsageError, match=r"expected \[n, d\], \[n, k\], \[n, k\]"):
        experts(tokens, indices, weights[:, :1])


def train(comm, sizes: dict, num_experts=6, **options):
    """Batches of 5, 2 and 1 tokens: ranks without samples, and experts without tokens."""
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=2):
        model = Mixture(num_experts)
    model = pc.parallelize(model, mesh, **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.5)
    random = torch.Generator().manual_seed(5)
    data = [torch.randn(n, DIM, generator=random) * 3 for n in (5, 2, 1)]
    losses = []
    for x, y in pc.shard([(x, x) for x in data], mesh):
        args = {"loss": lambda out, y: ((out - y).square().sum(), y.numel()), "microbatches": 2}
        losses.append(model.evaluate(x, y, **args))
        losses.append(model.step(x, y, **args).loss)
        optimizer.step()
    unused = gather_objects(pc.trainer_of(model).last.unused, comm)
    return losses, pc.whole_weights(model), sorted({name for of in unused for name in of})


def test_few_tokens_and_experts_without_any_equal_one_process():
    assert_equal_one_process(
        train,
        [
            ({"ep": 2}, {"zero": 3}),
            ({"ep": 3}, {}),
            ({"ep": 4}, {"zero": 1}),
            ({"dp": 2, "ep": 2}, {"zero": 2}),
        ],
    )
    assert "experts.5.up.weight" in one_process(train)[2]


def test_tokens_travel_twice_forward_and_twice_backward():
    """With uniform routing, k of n tokens each time, except those with their expert here."""
    tokens, each, layers, microbatches = 16, 2, 3, 2

    def work(comm):
        torch.set_default_dtype(torch.float64)
        n = comm.size
        mesh = pc.mesh(dp=1, ep=-1, comm=comm)
        model = pc.parallelize(nn.Sequential(*(Mixture(4) for _ in range(layers))), mesh)
        uniform = torch.arange(tokens * each // microbatches).view(-1, each) % 4
        for module in model:  # every expert as often as any other
            module.forward = lambda x, m=module: m.experts(m.enter(x), uniform, uniform * 0.5)
        group = mesh.line("ep")
        before = group.comm.ledger["sent_bytes"]
        group.all_to_all(torch.zeros(0, DIM), [0] * n, [0] * n)
        agreeing = group.comm.ledger["sent_bytes"] - before  # on the counts
        mesh.ledger.clear()
        before = group.comm.ledger["sent_bytes"]
        x = torch.randn(tokens, DIM)
        model.step(
            x, x, loss=lambda out, y: (out.square().sum(), len(y)), microbatches=microbatches
        )
        sent = group.comm.ledger["sent_bytes"] - before
        entry = mesh.ledger.of("ep", "all_to_all")
        counts = mesh.ledger.of("ep", "all_gather")
        sent -= counts.nbytes * (n - 1) // n + entry.calls * agreeing
        return entry.calls, entry.nbytes, counts.calls, sent

    moved = 4 * layers * each * tokens * DIM * ITEM
    for n, found in zip((2, 4), in_one_world(work, [(2,), (4,)]), strict=True):
        calls = layers * microbatches
        assert found == [(4 * calls, moved, calls, moved * (n - 1) // n)] * n


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        return functional.dropout(self.linear(x), 0.1)


def function_that_drops_within_experts(mesh):
    model = Mixture(4)
    model.experts = pc.Experts(Dropping() for _ in range(4))
    x = torch.zeros(4, DIM)
    pc.parallelize(model, mesh).step(x, x, loss=lambda out, y: out.sum())


def test_what_experts_cannot_is_one_sentence_on_every_rank():
    one = (torch.ones(1), torch.ones(1))
    assert_refused(
        {
            "ep=2: layer '0' has 1 experts, fewer than ranks: take ep=1 or less": (
                lambda mesh: pc.parallelize(nn.Sequential(pc.Experts([nn.Linear(2, 2)])), mesh)
            ),
            "ep=2: Linear has no pc.Experts that could be shared out": (
                lambda mesh: pc.parallelize(nn.Linear(2, 2), mesh)
            ),
            "layer '0': dropout within experts cannot be keyed by place": (
                lambda mesh: pc.parallelize(pc.Experts(nn.Dropout(0.1) for _ in range(4)), mesh)
            ),
            "dropout within experts cannot be keyed by place, so meshes would differ": (
                function_that_drops_within_experts
            ),
            "a batch of 1 samples is smaller than dp x ep=2": (
                lambda mesh: list(pc.shard([one], mesh))
            ),
        },
        ep=2,
    )
    assert_refused(
        {
            "layer 'blocks.1.experts.0.up': with sequence_par": lambda mesh: pc.parallelize(
                GPT(experts=4), mesh, tp=PLAN, pp="blocks", sequence_parallel=True
            )
        },
        tp=2,
    )
