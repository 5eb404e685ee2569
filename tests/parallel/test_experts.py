"""Expert parallel: experts are shared out, tokens travel, and all is as on one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, MLP, PLAN  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from pycoll import UsageError, run_ranks  # noqa: E402
from pycoll import parallel as pc  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

DIM, ITEM = 8, 8


class Mixture(nn.Module):
    """Experts that are asked as the first feature of a token says."""

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


@pytest.mark.slow
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
    """Batches of 5, 2 and 1 tokens: ranks without samples, and experts that nobody asks."""
    torch.set_num_threads(1)
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
    return losses, pc.whole_weights(model), pc.trainer_of(model).last.unused


@pytest.mark.parametrize(
    ("n", "sizes", "options"),
    [
        (2, {"dp": 1, "ep": 2}, {"zero": 3}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (3, {"dp": 1, "ep": 3}, {}),
                (4, {"dp": 1, "ep": 4}, {"zero": 1}),
                (4, {"dp": 2, "ep": 2}, {"zero": 2}),
            )
        ),
    ],
    ids=str,
)
def test_few_tokens_and_experts_without_any_equal_one_process(n, sizes, options):
    ((losses, weights, unused),) = run_ranks(train, 1, {})
    assert "experts.5.up.weight" in unused
    found = run_ranks(train, n, sizes, **options)
    for got in found:
        assert losses == pytest.approx(got[0], abs=1e-10)
        assert weights.keys() == got[1].keys()
        for name, weight in weights.items():
            assert (weight - got[1][name]).abs().max() <= 1e-10, name
    assert set(unused) == set().union(*(got[2] for got in found))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_tokens_travel_twice_forward_and_twice_backward(n):
    """Of uniform routing, k of n tokens each time, but for those whose experts are here."""
    tokens, each, layers, microbatches = 16, 2, 3, 2

    def work(comm):
        torch.set_default_dtype(torch.float64)
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

    moved = each * tokens * DIM * ITEM
    for calls, nbytes, counts, sent in run_ranks(work, n):
        assert calls == 4 * layers * microbatches and counts == layers * microbatches
        assert nbytes == 4 * layers * moved
        assert sent == 4 * layers * moved * (n - 1) // n


def fewer_experts_than_ranks(mesh):
    pc.parallelize(nn.Sequential(pc.Experts([nn.Linear(2, 2)])), mesh)


def no_experts(mesh):
    pc.parallelize(nn.Linear(2, 2), mesh)


def dropout_within_experts(mesh):
    pc.parallelize(pc.Experts(nn.Dropout(0.1) for _ in range(4)), mesh)


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


MISTAKES = {
    fewer_experts_than_ranks: "ep=2: layer '0' has 1 experts, fewer than ranks: take ep=1 or less",
    no_experts: "ep=2: Linear has no pc.Experts that could be shared out",
    dropout_within_experts: "layer '0': dropout within experts cannot be keyed by place",
    function_that_drops_within_experts: "layer 'experts.0': dropout within experts cannot be keyed",
}


@pytest.mark.slow
def test_what_experts_cannot_is_one_sentence_on_every_rank():
    def work(comm):
        torch.set_num_threads(1)
        mesh = pc.mesh(dp=1, ep=2, comm=comm)
        said = {}
        for mistake in MISTAKES:
            with pytest.raises(UsageError) as raised:
                mistake(mesh)
            said[mistake.__name__] = str(raised.value)
        with pytest.raises(UsageError, match="a batch of 1 samples is smaller than dp x ep=2"):
            list(pc.shard([(torch.ones(1), torch.ones(1))], mesh))
        return said

    for mistake, message in MISTAKES.items():
        assert message in run_ranks(work, 2)[0][mistake.__name__]


@pytest.mark.slow
def test_tensors_within_experts_are_refused_with_sequence_parallel():
    def work(comm):
        model = GPT(experts=4)
        with pytest.raises(UsageError, match=r"layer 'blocks.1.experts.0.up': with sequence_par"):
            pc.parallelize(
                model, pc.mesh(dp=1, tp=2, comm=comm), tp=PLAN, pp="blocks", sequence_parallel=True
            )

    run_ranks(work, 2)
