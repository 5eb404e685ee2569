"""Models cut at their blocks: what each stage has, and what it computes."""

from __future__ import annotations

import pytest
import torch
from models import GPT, batch, gpt, loss_sum
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline

pytestmark = [pytest.mark.pure, pytest.mark.torch]


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
    message = "costs has 3 values, expected 4: one per block of 'blocks'"
    with pytest.raises(UsageError, match=message):
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


def test_loss_of_models_is_that_of_the_reference():
    """The oracle itself: the sum over samples does not depend on how they are split."""
    x, y = batch(6)
    model = gpt()
    whole, count = loss_sum(model(x), y)
    parts = [loss_sum(model(x[i : i + 2]), y[i : i + 2]) for i in (0, 2, 4)]
    assert float(whole.detach()) == pytest.approx(sum(float(t.detach()) for t, _ in parts))
    assert count == sum(n for _, n in parts)
