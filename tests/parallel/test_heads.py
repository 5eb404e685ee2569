"""Plans that share out some layers of a module with heads: its heads are divided, or stay whole."""

from __future__ import annotations

import pytest
from mesh_cases import assert_equal_one_process, assert_refused, fit
from tiny_gpt import GPT, batches
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc
from pycoll.parallel.features.tensor.heads import Heads
from pycoll.parallel.features.tensor.plan import match


class LowRank(nn.Module):
    """A block whose queries go through two layers, as in DeepSeek, beside a router of its MLPs."""

    def __init__(self, dim=16, heads=4) -> None:
        super().__init__()
        self.num_heads = heads
        self.norm, self.q_norm = nn.LayerNorm(dim), nn.LayerNorm(6)
        self.q_a, self.q_b = nn.Linear(dim, 6), nn.Linear(6, dim)
        self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.router, self.up, self.down = nn.Linear(dim, 1), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x_BTD):
        y = self.norm(x_BTD)
        shape = (*y.shape[:-1], self.num_heads, -1)
        q, k, v = (z.view(shape).transpose(1, 2) for z in self.heads_of(y))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(self.up(x_BTD).relu()) * self.router(x_BTD).sigmoid()

    def heads_of(self, y):
        return self.q_b(self.q_norm(self.q_a(y))), self.k(y), self.v(y)


class Shared(LowRank):
    """A whole layer's output is added to the heads of a shared one."""

    def heads_of(self, y):
        return self.q_b(self.q_norm(self.q_a(y))), self.k(y) + self.router(y), self.v(y)


def model(kind=LowRank):
    gpt = GPT(drop=0.1, depth=2, heads=4)
    gpt.blocks = nn.ModuleList(kind() for _ in range(2))
    return gpt


MODELS = {
    "low rank": model,
    "gpt": lambda: GPT(heads=4, depth=2, fused=True),
    "experts": lambda: GPT(heads=4, depth=2, drop=0.0, experts=4),
}
MLP = {"*.up": "col", "*.down": "row"}
ATTENTION = {"*.q_b|*.k|*.v": "col", "*.out": "row"}


def train(comm, sizes, kind, **options):
    return fit(comm, sizes, MODELS[kind], batches(2, 4), pp="blocks", **options)


def test_plans_of_some_layers_equal_one_process():
    cases = [
        ("gpt", MLP, {}),  # heads stay
        ("low rank", ATTENTION, {}),  # divided, beside three layers that stay whole
        ("low rank", {**ATTENTION, **MLP}, {}),
        ("low rank", MLP, {}),
        ("experts", {"blocks.*.qkv": "qkv", "blocks.*.out": "row", "blocks.0.up": "col",
                     "blocks.0.down": "row"}, {}),
        ("gpt", {"*.up": pc.Column(heads=False), "*.down": "row"}, {}),
        ("low rank", {**ATTENTION, "*.v": pc.Column(heads=True)}, {}),
    ]  # fmt: skip
    assert_equal_one_process(
        train, [({"tp": 2}, {"tp": tp, **options}, {"kind": kind}) for kind, tp, options in cases]
    )


def whole(model: nn.Module, tp: dict) -> set[str]:
    return Heads(model, match(model, tp)).whole


@pytest.mark.pure
def test_heads_are_decided_for_modules_with_the_same_layers():
    """The second block cannot run without values; the first one has shown the answer."""
    stops = model()
    stops.blocks[1].norm.register_forward_hook(lambda *args: float(args[-1].sum()))
    assert whole(stops, ATTENTION) == set()
    assert whole(stops, MLP) == {"blocks.0", "blocks.1"}


def test_plans_whose_heads_cannot_be_seen_are_refused():
    def parallelized(made, tp, **options):
        return lambda mesh: pc.parallelize(made(), mesh, tp=tp, **options)

    def in_pixels():
        return nn.Sequential(nn.Unflatten(0, (1, 1)), LowRank())

    assert_refused(
        {
            "tp plan: layer 'blocks.0.router' stays whole, but its output meets the part": (
                parallelized(lambda: model(Shared), ATTENTION)
            ),
            "tp plan: layer 'blocks.0.k' stays whole, but its output meets the part that a rank "
            "has of 'blocks.0.q_b'": parallelized(model, {"*.q_b": "col"}),
            "sequence_parallel: the heads of 'blocks.0' (LowRank) stay whole, but this rank has": (
                parallelized(model, MLP, sequence_parallel=True, pp="blocks")
            ),
            "sequence_parallel: the heads of 'blocks.1' (LowRank) stay whole": parallelized(
                model,
                {"*.0.q_b|*.0.k|*.0.v": "col", "*.0.out": "row"},
                sequence_parallel=True,
                pp="blocks",
            ),
            "makes the heads of '1' (LowRank, num_heads = 4) cannot be seen (the model cannot run "
            "with 2 sequences of 8 tokens: ": parallelized(in_pixels, {"1.up": "col"}),
        },
        tp=2,
    )
