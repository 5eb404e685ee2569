"""Models cut at their blocks: parts and results of each stage."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from models import batch, gpt
from tiny_gpt import GPT
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.microbatches import split_batch

pytestmark = [pytest.mark.pure, pytest.mark.torch]


class Inner(nn.Module):
    """Like models of libraries: blocks return tuples, take keywords, and have attributes."""

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
    expected = model.blocks[0](x)
    cut = pipeline.cut(model, "blocks", 2, [0])
    assert torch.equal(cut.model.blocks[0](x), expected)
    with pytest.raises(UsageError, match="blocks.1 is not on this rank, which holds stages"):
        model.blocks[1](x)
    assert "Block of another rank" in repr(model)


def test_blocks_are_split_by_costs():
    cut = pipeline.cut(gpt(depth=4), "blocks", 2, [0], costs=[5, 1, 1, 1])
    assert cut.bounds == (0, 1, 4)
    message = "costs has 3 values, expected 4: one per block of 'blocks'"
    with pytest.raises(UsageError, match=message):
        pipeline.cut(gpt(depth=4), "blocks", 2, [0], costs=[1, 1, 1])


@pytest.mark.parametrize("several_times", [False, True])
def test_sequential_is_cut_as_it_is_and_a_block_used_twice_is_shared(several_times):
    def model():
        torch.manual_seed(1)
        layers = [nn.Linear(3, 3)] * 4 if several_times else [nn.Linear(3, 3) for _ in range(4)]
        return nn.Sequential(*layers)

    x = torch.randn(5, 3)
    cuts = [pipeline.cut(model(), "", 2, [stage]) for stage in range(2)]
    assert torch.equal(run_stages(cuts, (x,), {}), model()(x))
    shared = {"0.weight": (0, 1), "0.bias": (0, 1)} if several_times else {}
    assert cuts[1].shared == shared


class HeadFirst(GPT):
    """Registers its head before its blocks."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self._modules["blocks"] = self._modules.pop("blocks")


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
        x = self.token(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def test_models_that_cannot_be_cut_so_are_told_why():
    tokens, _ = batch(2)
    with pytest.raises(UsageError, match=r"no list of blocks 'layers'.* there are blocks"):
        pipeline.cut(gpt(), "layers", 2, [0])
    cuts = [pipeline.cut(gpt(HeadFirst, 2), "blocks", 2, [stage]) for stage in range(2)]
    with pytest.raises(UsageError, match="norm is registered before the blocks, but used after"):
        run_stages(cuts, (tokens,), {})
    with pytest.raises(UsageError, match="expected the blocks in their order, each once"):
        run_stages([pipeline.cut(gpt(Backwards), "blocks", 2, [0])], (tokens,), {})
    with pytest.raises(UsageError, match=r"keep it on both, with both=\['embed'\]"):
        run_stages([pipeline.cut(Reuses(), "blocks", 2, [s]) for s in range(2)], (tokens,), {})
    with pytest.raises(UsageError, match="stage 0 has no inputs: give every rank"):
        pipeline.cut(gpt(), "blocks", 2, [0]).forward(0, (), {}, None, {})


class Slices(GPT):
    """Uses weights before the blocks without calling their module."""

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_weights_sliced_before_the_blocks_are_blanks_behind_the_first_stage():
    tokens, _ = batch(2)
    cuts = [pipeline.cut(gpt(Slices, 3), "blocks", 3, [stage]) for stage in range(3)]
    assert torch.equal(run_stages(cuts, (tokens,), {}), gpt(Slices, 3)(tokens))


def test_module_used_on_both_sides_stays_on_both():
    def model():
        torch.manual_seed(2)
        return Reuses()

    tokens, _ = batch(2)
    cuts = [pipeline.cut(model(), "blocks", 2, [s], both=["embed"]) for s in range(2)]
    assert torch.equal(run_stages(cuts, (tokens,), {}), model()(tokens))
    assert cuts[0].shared == {"embed.weight": (0, 1)}


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
