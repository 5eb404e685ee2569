"""The parts of the runtime alone: transfers, the split of stages, backward in two, the cut."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from models import GPT, batch, gpt, loss_sum
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.actions import Kind
from pycoll.parallel.pipeline.backward import backward_inputs
from pycoll.parallel.pipeline.microbatches import split_batch
from pycoll.parallel.pipeline.transfers import receive_of, with_transfers

pytestmark = [pytest.mark.pure, pytest.mark.torch]


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("name", pipeline.names())
def test_transfers_are_matched_posted_ahead_and_bounded(name, prefetch):
    schedule = pipeline.build(name, 4, 6)
    lowered = with_transfers(schedule, prefetch)
    pipeline.validate(lowered)
    assert lowered.without(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B) == schedule
    sent, received = set(), set()
    for order in lowered.orders:
        waiting = 0
        posted = set()
        for action in order:
            s, i = action.stage, action.microbatch
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                waiting += 1
                posted.add(action)
                assert waiting <= prefetch
                received.add((action.kind is Kind.RECV_F, s, i))
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                forward = action.kind is Kind.SEND_F
                sent.add((forward, s + 1 if forward else s - 1, i))
            elif (need := receive_of(schedule, action)) is not None:
                assert need in posted
                waiting -= 1
    assert sent == received
    stages = schedule.num_stages
    local = sum(a == b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    assert len(sent) == 2 * 6 * (stages - 1 - local)


# The split of blocks into stages.


def brute_force(costs: list[float], stages: int, before: float, after: float) -> float:
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        sums[0] += before
        sums[-1] += after
        best = min(best, max(sums))
    return best


def test_split_is_as_good_as_all_splits():
    generator = random.Random(7)
    for blocks in range(1, 13):
        for stages in range(1, min(4, blocks) + 1):
            for _ in range(5):
                costs = [generator.choice([0.0, 1.0, generator.random()]) for _ in range(blocks)]
                before, after = generator.choice([(0.0, 0.0), (0.7, 1.3)])
                bounds = pipeline.split(costs, stages, before, after)
                assert len(bounds) == stages + 1 and bounds[0] == 0 and bounds[-1] == blocks
                assert all(a < b for a, b in itertools.pairwise(bounds))
                sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
                sums[0] += before
                sums[-1] += after
                expected = brute_force(costs, stages, before, after)
                assert max(sums) == pytest.approx(expected, abs=1e-12), (costs, stages)


def test_split_of_too_few_blocks_is_refused():
    with pytest.raises(UsageError, match=r"cannot split 2 blocks into 3 stages: expected 1\.\.2"):
        pipeline.split([1, 1], 3)
    with pytest.raises(UsageError, match="the cost of a block is nan"):
        pipeline.split([1, float("nan")], 2)


# Backward in two parts.


class Shared(nn.Module):
    """One layer twice, one weight in two places, a weight before and after the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.gain, self.unused = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x):
        h = self.norm(torch.tanh(self.linear(x)) * self.gain)
        return torch.tanh(self.linear(h)) + self.gain.sin() * 2, (self.gain**2).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv, self.bias = nn.Conv1d(4, 4, 3, padding=1), nn.Parameter(torch.rand(1, 4))

    def forward(self, x):
        x = x + self.bias
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return (x + self.conv(x.transpose(1, 2)).transpose(1, 2),)


class NoInput(nn.Module):
    """Its output has nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 5, 4))

    def forward(self, x):
        return (self.weight.exp(),)


class MoreOutputs(nn.Module):
    """Nodes with several outputs, of which not all are used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        a, _, c = self.linear(x).chunk(3, -1)
        return self.rnn(a)[0] * c.sigmoid(), a.max(-1).values


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize("model", [Shared, Attention, NoInput, MoreOutputs, lambda: gpt(depth=1)])
def test_split_backward_is_the_whole_one(model, with_input):
    torch.manual_seed(0)
    module = model().double()
    x = torch.randn(3, 5, 4).double()
    if isinstance(module, GPT):
        module = module.blocks[0]
        x = torch.randn(2, 4, 16).double()
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        run = lambda value: (module(value, mask),)  # noqa: E731
    else:
        run = module
    leaf = x.clone().requires_grad_(with_input)
    outputs = run(leaf)
    given = [torch.randn_like(out) for out in outputs]
    torch.autograd.backward(list(outputs), given)
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()

    again = x.clone().requires_grad_(with_input)
    outputs = run(again)
    inputs = [again] if with_input else []
    found, later = backward_inputs(list(outputs), given, inputs, list(module.parameters()))
    assert all(p.grad is None for p in module.parameters())  # nothing of weights yet
    later()
    if with_input:
        if leaf.grad is None:
            assert found[0] is None
        else:
            assert torch.allclose(found[0], leaf.grad, atol=1e-12, rtol=0)
    for name, parameter in module.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert torch.allclose(parameter.grad, expected[name], atol=1e-12, rtol=0), name


def test_weights_part_does_not_go_down_the_trunk_again():
    """W costs the weights' gradients alone: the nodes of the trunk below are not run."""
    ran = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ran.append(ctx.name)
            return grad, None

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    out = Spy.apply(second(Spy.apply(first(Spy.apply(x, "in")), "middle")), "out")
    weights = [*first.parameters(), *second.parameters()]
    _, later = backward_inputs([out], [torch.ones_like(out)], [x], weights)
    assert ran == ["out", "middle", "in"]
    later()
    assert ran == ["out", "middle", "in"]


# The cut.


class Inner(nn.Module):
    """As models of libraries are: blocks that return tuples, keywords, attributes read."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(11, 16), nn.ModuleList(Tuple(i) for i in range(4))
        self.rotary, self.ln_f = nn.Identity(), nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, input_ids=None, attention_mask=None):
        hidden = self.wte(input_ids) * self.scale
        masks = {"full": attention_mask[:, None, :, None].bool(), "none": None}
        for layer in self.h[: len(self.h)]:
            outputs = layer(hidden_states=hidden, mask=masks[layer.kind], position=self.rotary(1))
            hidden = outputs[0]
        return self.ln_f(hidden)


class Tuple(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.kind = "full" if index % 2 else "none"
        self.up = nn.Linear(16, 16)

    def forward(self, *, hidden_states, mask, position):
        update = self.up(hidden_states).tanh()
        if mask is not None:
            update = update * mask[:, 0]
        return hidden_states + update, None, {"note": position}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.lm_head = Inner(), nn.Linear(16, 11, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids, attention_mask):
        return self.lm_head(self.transformer(input_ids, attention_mask=attention_mask))


def outer() -> Outer:
    torch.manual_seed(0)
    return Outer().double()


def run_stages(cuts: list, args: tuple, kwargs: dict) -> torch.Tensor:
    hidden, notes = None, {}
    for stage, cut in enumerate(cuts):
        hidden = cut.forward(stage, args, kwargs, hidden, notes)
    return hidden


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_cut_of_a_library_like_model_computes_the_same(stages):
    tokens, _ = batch(3)
    kwargs = {"input_ids": tokens, "attention_mask": torch.randint(2, tokens.shape)}
    whole = outer()
    expected = whole(**kwargs)
    names = dict(whole.named_parameters(remove_duplicate=False))
    cuts = [pipeline.cut(outer(), "transformer.h", stages, [stage]) for stage in range(stages)]
    assert torch.equal(run_stages(cuts, (), kwargs), expected)
    here = [dict(cut.model.named_parameters()) for cut in cuts]
    assert set().union(*here) <= names.keys()
    for name in names:
        if ".h." in name or "ln_f" in name:
            assert sum(name in of for of in here) == 1, name
        else:
            counting = [cut for cut in cuts if name in dict(cut.model.named_parameters())]
            assert sum(cut.counts(name) for cut in counting) <= 1
    if stages > 1:
        ends = (0, stages - 1)
        everywhere = tuple(range(stages))
        shared = {"transformer.scale": everywhere, "transformer.wte.weight": ends}
        assert cuts[0].shared == shared
    assert isinstance(cuts[-1].model.transformer.h[3], Tuple)  # and its name stays, too
    assert type(cuts[-1].model.transformer.h[3]).__name__ == "Tuple"


def test_part_of_a_cut_model_alone_behaves_as_before():
    model = gpt(depth=2)
    x = torch.randn(1, 3, 16).double()
    mask = torch.ones(3, 3, dtype=torch.bool)
    expected = model.blocks[0](x, mask)
    cut = pipeline.cut(model, "blocks", 2, [0])
    assert torch.equal(cut.model.blocks[0](x, mask), expected)
    with pytest.raises(UsageError, match="blocks.1 is not on this rank, which holds stages"):
        model.blocks[1](x, mask)
    assert "Block of another rank" in repr(model)


def test_blocks_are_split_by_costs():
    cut = pipeline.cut(gpt(depth=4), "blocks", 2, [0], costs=[5, 1, 1, 1])
    assert cut.bounds == (0, 1, 4)
    with pytest.raises(UsageError, match="there are 3 costs for the 4 blocks of 'blocks'"):
        pipeline.cut(gpt(depth=4), "blocks", 2, [0], costs=[1, 1, 1])


def test_sequential_is_cut_as_it_is():
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh())

    x = torch.randn(5, 3)
    cuts = [pipeline.cut(model(), "", 3, [stage]) for stage in range(3)]
    assert torch.equal(run_stages(cuts, (x,), {}), model()(x))


def test_one_block_several_times_is_one_shared_parameter():
    def model():
        torch.manual_seed(1)
        return nn.Sequential(*[nn.Linear(3, 3)] * 4)

    x = torch.randn(2, 3)
    cuts = [pipeline.cut(model(), "", 2, [stage]) for stage in range(2)]
    assert torch.equal(run_stages(cuts, (x,), {}), model()(x))
    assert cuts[1].shared == {"0.weight": (0, 1), "0.bias": (0, 1)}


class HeadFirst(GPT):
    """Registers its head before its blocks."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        blocks, self.blocks = self.blocks, None
        del self.blocks
        self.blocks = blocks


class Reuses(nn.Module):
    """Uses the embedding's weight once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


class Backwards(GPT):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x, torch.ones(1, dtype=torch.bool))
        return self.head(x)


def test_models_that_cannot_be_cut_so_are_told_why():
    tokens, _ = batch(2)
    with pytest.raises(UsageError, match=r"no list of blocks 'layers'.* there are blocks"):
        pipeline.cut(gpt(), "layers", 2, [0])
    cuts = [pipeline.cut(HeadFirst(), "blocks", 2, [stage]) for stage in range(2)]
    with pytest.raises(UsageError, match="norm is registered before the blocks, but used after"):
        run_stages(cuts, (tokens,), {})
    with pytest.raises(UsageError, match="expected the blocks in their order, each once"):
        run_stages([pipeline.cut(Backwards(), "blocks", 2, [0])], (tokens,), {})
    with pytest.raises(UsageError, match=r"keep it on both, with both=\['embed'\]"):
        run_stages([pipeline.cut(Reuses(), "blocks", 2, [s]) for s in range(2)], (tokens,), {})
    with pytest.raises(UsageError, match="stage 0 has no inputs: give every rank"):
        pipeline.cut(gpt(), "blocks", 2, [0]).forward(0, (), {}, None, {})


class Slices(GPT):
    """Uses weights before the blocks without calling their module."""

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def test_weights_sliced_before_the_blocks_are_blanks_behind_the_first_stage():
    def model():
        torch.manual_seed(2)
        return Slices(depth=3)

    tokens, _ = batch(2)
    cuts = [pipeline.cut(model(), "blocks", 3, [stage]) for stage in range(3)]
    assert torch.equal(run_stages(cuts, (tokens,), {}), model()(tokens))


def test_module_used_on_both_sides_stays_on_both():
    def model():
        torch.manual_seed(2)
        return Reuses()

    tokens, _ = batch(2)
    cuts = [pipeline.cut(model(), "blocks", 2, [s], both=["embed"]) for s in range(2)]
    assert torch.equal(run_stages(cuts, (tokens,), {}), model()(tokens))
    assert cuts[0].shared == {"embed.weight": (0, 1)}


# Batches.


def test_batch_is_split_as_even_as_it_can_be():
    x = torch.arange(7)
    parts = split_batch({"x": x, "flag": True, "pair": (x, None)}, 3)
    assert [len(part["x"]) for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), x)
    assert all(part["flag"] is True for part in parts)
    assert len(split_batch(x, 10)) == 7
    assert split_batch(x[:0], 2) == [] and split_batch(None, 2) is None
    with pytest.raises(UsageError, match=r"have \[5, 7\] samples"):
        split_batch((x, x[:5]), 2)
    with pytest.raises(UsageError, match="2 microbatches are given in a list, but microbatches"):
        split_batch([x, x], 3)


def test_loss_of_models_is_that_of_the_reference():
    """The oracle itself: the sum over samples does not depend on how they are split."""
    x, y = batch(6)
    model = gpt()
    whole, count = loss_sum(model(x), y)
    parts = [loss_sum(model(x[i : i + 2]), y[i : i + 2]) for i in (0, 2, 4)]
    assert float(whole.detach()) == pytest.approx(sum(float(t.detach()) for t, _ in parts))
    assert count == sum(n for _, n in parts)
