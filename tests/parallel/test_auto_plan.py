"""Plans that are found, or read from a model of transformers."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from mesh_cases import assert_equal_one_process, fit
from tiny_gpt import GPT, batches
from torch import nn
from torch.nn import functional

from pycoll import UsageError
from pycoll import parallel as pc


def found(model: nn.Module, x=None) -> dict:
    return pc.auto_plan(model, x, file=io.StringIO())


GPT_PLAN = {
    "token": "vocab", "blocks.*.qkv": "qkv", "blocks.*.out": "row", "blocks.*.up": "col",
    "blocks.*.down": "row", "head": "vocab",
}  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"tie": True}])
def test_plan_of_a_gpt_is_that_of_megatron(options):
    text = io.StringIO()
    with torch.device("meta"):
        model = GPT(depth=3, **options)
    assert pc.auto_plan(model, file=text) == GPT_PLAN
    assert text.getvalue().splitlines()[0] == "tp plan of GPT:"
    assert "  blocks.*.down  row" in text.getvalue()


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    """Grouped queries, rotary positions, and norms of queries and keys."""

    def __init__(self, dim=32, heads=4, kv_heads=2) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, kv_heads
        self.head_dim = size = dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * size, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = RMSNorm(size), RMSNorm(size)

    def forward(self, x, cos, sin):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = turned(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)
        k = turned(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        times = self.num_heads // self.num_key_value_heads
        k, v = (y.repeat_interleave(times, 1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        mixed = scores.softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)), scores


class GatedMLP(nn.Module):
    def __init__(self, dim=32, hidden=44) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(32), RMSNorm(32)
        self.attention, self.mlp = Attention(), GatedMLP()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm_1(x), cos, sin)[0]
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 32)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.norm, self.lm_head = RMSNorm(32), nn.Linear(32, 29, bias=False)

    def forward(self, tokens):
        angles = torch.arange(tokens.shape[1])[:, None] * 10.0 ** -torch.arange(4).repeat(2)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return self.lm_head(self.norm(x))


LLAMA_PLAN = {
    "embed": "vocab",
    "layers.*.attention": "region",
    **{f"layers.*.attention.{name}_proj": "col" for name in "qkv"},
    "layers.*.attention.o_proj": "row",
    **{f"layers.*.attention.{name}_norm": "inside" for name in "qk"},
    "layers.*.mlp": "region",
    **{f"layers.*.mlp.{name}_proj": "col" for name in ("gate", "up")},
    "layers.*.mlp.down_proj": "row",
    "lm_head": "vocab",
}


@pytest.mark.pure
def test_plan_of_a_llama_has_its_projections_norms_and_regions():
    assert found(Llama()) == LLAMA_PLAN


class Odd(nn.Module):
    """Pairs that must stay whole, and one that need not."""

    def __init__(self) -> None:
        super().__init__()
        names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        of = self.layers
        x = of["b"](of["a"](x).softmax(-1))  # a sum over columns
        x = of["d"](of["c"](x) + x)  # columns and a whole
        y = of["e"](x)
        x = of["f"](y) + y.mean()  # a column is used elsewhere
        x = self.norm(of["g"](x)).relu()  # a norm over columns
        return of["i"](of["h"](x).relu())


@pytest.mark.pure
def test_layers_stay_whole_where_columns_meet():
    assert found(Odd(), torch.zeros(2, 8)) == {"layers.h": "col", "layers.i": "row"}


@pytest.mark.pure
def test_models_without_pairs_and_unfit_batches_are_refused():
    with pytest.raises(UsageError, match="no pair of linear layers of Sequential can be shared"):
        found(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4))
    with pytest.raises(UsageError, match="Linear cannot run with .* give x as for model.step"):
        found(nn.Linear(4, 4))


MODELS = {"gpt": lambda: GPT(drop=0.0), "llama": Llama}


def train(comm, sizes, kind, **options):
    plan = found(MODELS[kind]())
    return fit(comm, sizes, MODELS[kind], batches(3, 4), tp=plan, **options)


def test_models_by_their_found_plan_equal_one_process():
    assert_equal_one_process(
        train,
        [
            ({"tp": 2}, {}, {"kind": "gpt"}),
            ({"tp": 2}, {"sequence_parallel": True, "pp": "layers"}, {"kind": "llama"}),
        ],
    )


def of_transformers(tied: bool) -> nn.Module:
    """As a model of transformers says it: patterns of the base in its configuration."""
    model = nn.Module()
    model.base_model_prefix, model.model = "model", Llama()
    model.lm_head, model.model.lm_head = model.model.lm_head, nn.Identity()
    if tied:
        model.lm_head.weight = model.model.embed.weight
    model.config = SimpleNamespace(
        base_model_tp_plan={
            **{f"layers.*.attention.{name}_proj": "colwise" for name in "qkv"},
            "layers.*.attention.o_proj": "rowwise",
            **{
                f"layers.*.attention.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"
            },
            **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
            "layers.*.mlp.down_proj": "rowwise",
            "norm": "sequence_parallel",
            "layers.*.missing": "colwise",
        }
    )
    model._tp_plan = {"lm_head": "colwise_rep"}
    return model


@pytest.mark.pure
def test_plan_of_transformers_is_read():
    ours = {f"model.{k}": v for k, v in LLAMA_PLAN.items() if k not in ("embed", "lm_head")}
    for tied in (False, True):
        model = of_transformers(tied)
        plan = pc.tp_plan(model)
        names = [name for name, _ in model.named_modules()]
        expected = {
            pattern.replace("*", str(i)): style for pattern, style in ours.items() for i in (0, 1)
        }
        expected["lm_head"] = "vocab"
        if tied:
            expected["model.embed"] = "vocab"
        assert plan == expected and plan.keys() <= set(names)
    model.config.base_model_tp_plan["layers.*.mlp"] = "grouped_gemm"
    with pytest.raises(UsageError, match="style 'grouped_gemm' of transformers, which has no"):
        pc.tp_plan(model)
    with pytest.raises(UsageError, match="GPT has no plan of transformers"):
        pc.tp_plan(GPT())
