"""Annotations of a few tensors: what follows from them, what it sends, and what it computes."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import assert_equal_one_process, assert_refused, fit, in_one_world
from test_auto_plan import Llama
from tiny_gpt import GPT, PLAN, Blocks, batches
from torch import nn
from torch.nn import functional

from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.parallel.features.annotate.cuts import Cut, through_view

TWO = {"*.qkv": (None, "tp:3"), "*.up": (None, "tp")}
SEQUENCE = {**TWO, "blocks.?|*.out|*.down": ("tp", None)}
X = torch.zeros(2, 8, 16)


def plan(model: nn.Module, placements: dict, x=None, ranks=2) -> pc.Sharding:
    return pc.annotate(placements, x).plan(model, ranks)


def cut(found: pc.Sharding) -> dict[str, int]:
    """The dimension that is shared out, by parameter."""
    return {name: dims.index("tp") for name, dims in found.parameters.items() if any(dims)}


@pytest.mark.pure
def test_two_annotations_of_a_block_give_the_plan_of_megatron():
    found = plan(Blocks(1), TWO, X)
    assert cut(found) == {
        "blocks.0.qkv.weight": 0, "blocks.0.qkv.bias": 0, "blocks.0.out.weight": 1,
        "blocks.0.up.weight": 0, "blocks.0.up.bias": 0, "blocks.0.down.weight": 1,
    }  # fmt: skip
    message = 4 * X.numel()
    both = {("forward", "all_reduce"), ("backward", "all_reduce")}
    assert found.nbytes == dict.fromkeys(both, (2, 2 * message)) and not found.whole
    table = str(found)
    assert "sharding over tp=2:" in table and "blocks.0.down.weight  (-, tp)" in table
    assert "whole: blocks.0.norm_1.weight" in table
    assert "forward all_reduce: 2 calls, 2,048 bytes" in table


@pytest.mark.pure
def test_queries_lead_backwards_to_keys_and_values():
    placements = {"*.q_proj": (None, "tp"), "*.gate_proj.weight": ("tp", None)}
    parts = cut(plan(Llama(), placements))
    first = {name[len("layers.0.") :]: parts[name] for name in parts if ".0." in name}
    assert first == {
        **{f"attention.{name}_proj.weight": 0 for name in "qkv"},
        "attention.o_proj.weight": 1,
        **{f"mlp.{name}_proj.weight": 0 for name in ("gate", "up")},
        "mlp.down_proj.weight": 1,
    }  # fmt: skip


@pytest.mark.pure
def test_what_cannot_be_shared_is_whole_and_named():
    def forward(self, x):
        return self[1](self[0](x).cumsum(-1)) + self[0](x).softmax(-1)

    model = type("Odd", (nn.Sequential,), {"forward": forward})(nn.Linear(8, 8), nn.Linear(8, 8))
    found = plan(model, {"0.weight": ("tp", None)}, torch.zeros(2, 8))
    assert cut(found) == {"0.weight": 0, "0.bias": 0}
    assert found.whole == (
        "cumsum (cumsum): how to share it is not known",
        "softmax (softmax): its dimension is needed whole, or does not divide",
    )


@pytest.mark.pure
def test_cuts_pass_through_views_as_elements_do():
    """Every cut of small tensors, against the numbers that a rank holds."""
    shapes = [(4, 6, 4), (24, 4), (4, 24), (4, 2, 3, 4), (2, 2, 24), (96,), (1, 4, 24)]
    found = 0
    for before in shapes:
        for after in shapes:
            x = torch.arange(96).view(before)
            for dim in range(len(before)):
                for blocks in (1, 2, 3, 4):
                    here = Cut(dim, blocks)
                    there = through_view(here, before, after)
                    if there is None or not (here.divides(before, 2) and there.divides(after, 2)):
                        continue
                    found += 1
                    assert part(x, here).flatten().equal(part(x.view(after), there).flatten())
    assert found > 100


def part(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    apart = x.unflatten(cut.dim, (cut.blocks, -1))
    return apart.chunk(2, cut.dim + 1)[0].flatten(cut.dim, cut.dim + 1)


def ledger_of(comm, options: dict) -> dict:
    mesh = pc.mesh(tp=comm.size, comm=comm)
    model = pc.parallelize(Blocks(2), mesh, **options)
    mesh.ledger.clear()
    x = torch.randn(2, 8, 16)
    model.step(x, x, loss=lambda out, y: (out.sum(), out.numel()), microbatches=1)
    found = {k: (e.calls, e.nbytes) for k, e in mesh.ledger.entries.items() if k[0] == "tp"}
    mesh.close()
    return found


def test_annotations_send_what_a_plan_by_hand_and_their_table_say():
    layers = {pattern: style for pattern, style in PLAN.items() if pattern.startswith("*")}
    annotated = [pc.annotate(placements, X) for placements in (TWO, SEQUENCE)]
    cases = [(4, {"tp": layers}), *((4, {"annotate": each}) for each in annotated)]
    by_hand, *found = (ranks[0] for ranks in in_one_world(ledger_of, cases))
    assert found[0] == by_hand
    for each, measured in zip(annotated, found, strict=True):
        kinds: dict[tuple[str, str], tuple[int, int]] = {}
        for (_, kind), (calls, nbytes) in each.plan(Blocks(2), 4).nbytes.items():
            before = kinds.get(("tp", kind), (0, 0))
            kinds["tp", kind] = before[0] + calls, before[1] + nbytes
        assert {key: measured[key] for key in kinds} == kinds


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(functional.relu(self.down(functional.gelu(self.up(x)))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(6 * 3 * 3, 3)

    def forward(self, x):
        y = functional.max_pool2d(functional.relu(self.first(x)), 1)
        return self.head(functional.relu(self.second(y)).flatten(1))


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            of(y).view(*y.shape[:2], 4, 2).transpose(1, 2) for of in (self.q, self.k, self.v)
        )
        mixed = (q @ k.mT / 2**0.5).softmax(-1) @ v
        return self.last(x + self.out(mixed.transpose(1, 2).reshape(x.shape))).mean(1)


SHAPES = {MLP: (6,), ConvNet: (2, 7, 7), AttentionBlock: (4, 8)}


def train(comm, sizes, kind, **options):
    torch.set_default_dtype(torch.float64)
    random = torch.Generator().manual_seed(3)
    data = [
        (
            torch.randn(8, *SHAPES[kind], generator=random, dtype=torch.float64),
            torch.randint(3, (8,), generator=random),
        )
        for _ in range(3)
    ]
    return fit(comm, sizes, kind, data, **options)


def of(placements: dict, kind: type) -> dict:
    return {"annotate": pc.annotate(placements, torch.zeros(4, *SHAPES[kind]))}


def test_annotated_models_equal_one_process():
    found = pc.auto_annotate(ConvNet(), torch.zeros(4, *SHAPES[ConvNet]), ranks=2)
    cases = [
        ({"tp": 2}, MLP, {"up": (None, "tp")}),
        ({"tp": 4}, MLP, {"down.weight": ("tp", None)}),
        ({"tp": 2}, MLP, {"up": ("tp", None), "down.weight": (None, "tp")}),  # samples, then a sum
        ({"tp": 2, "dp": 2}, MLP, {"up.bias": ("tp",), "last": ("tp", None)}),
        ({"tp": 2}, ConvNet, {"first": ("tp", None, None)}),
        ({"tp": 2}, ConvNet, {"second.weight": ("tp", None, None, None)}),
        ({"tp": 2}, ConvNet, {"first.weight": (None, "tp", None, None), "head": ("tp", None)}),
        ({"tp": 2}, ConvNet, dict(found.placements)),
        ({"tp": 4}, AttentionBlock, {"q": (None, "tp")}),
        ({"tp": 2}, AttentionBlock, {"q": (None, "tp"), "out": ("tp", None)}),
        ({"tp": 2}, AttentionBlock, {"norm": ("tp", None, None)}),
    ]
    assert_equal_one_process(
        train, [(sizes, of(placements, kind), {"kind": kind}) for sizes, kind, placements in cases]
    )


def train_gpt(comm, sizes, **options):
    def make():
        return GPT(drop=0.0, vocab=28, depth=2)

    return fit(comm, sizes, make, batches(3, 4, vocab=28), **options)


def test_annotated_transformer_equals_one_process():
    vocabulary = {"token.weight|head.weight": ("tp", None)}
    assert_equal_one_process(
        train_gpt,
        [
            ({"tp": 2}, {"annotate": pc.annotate({**TWO, **vocabulary})}),
            ({"tp": 2, "dp": 2}, {"annotate": pc.annotate(SEQUENCE), "zero": 2}),
        ],
    )


def test_unfit_annotations_are_refused():
    def putting(placements=TWO, x=X, model=None, **options):
        def mistake(mesh):
            annotate = pc.annotate(placements, x)
            pc.parallelize(model or Blocks(1), mesh, annotate=annotate, **options)

        return mistake

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    assert_refused(
        {
            "annotate: '*.missing' matches no parameter and no layer of Blocks": putting(
                {"*.missing": ("tp",)}
            ),
            "'blocks.0.up' with shape (2, 8, 64) does not divide into 5 blocks for tp=2": putting(
                {"*.up": (None, "tp:5")}
            ),
            "'*.up' has 'dp', expected None, 'tp', or such as 'tp:3'": putting({"*.up": ("dp",)}),
            "'blocks.0.up.weight' has shape (64, 16), and the annotation ('tp',)": putting(
                {"*.up.weight": ("tp",)}
            ),
            "annotate does not go with a tp plan: leave one out": putting(
                tp={"*.up": pc.Column(heads=False)}
            ),
            "annotate does not go with recompute": putting(recompute="blocks.*"),
            "the forward draws random numbers (aten.dropout": putting(
                {"0": (None, "tp")}, torch.zeros(2, 4),
                nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)),
            ),
            "the forward writes in place (aten.relu_.default)": putting(
                {"0": (None, "tp")}, torch.zeros(2, 4),
                nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
            ),
            "annotate: Reads cannot be traced with [(2, 4)]": putting(
                {"weight": ("tp", None)}, torch.zeros(2, 4), Reads(4, 4)
            ),
            "annotate is a dict, expected the result of pc.annotate": lambda mesh: pc.parallelize(
                Blocks(1), mesh, annotate=TWO
            ),
        },
        tp=2,
    )  # fmt: skip
    with pytest.raises(UsageError, match="has 'tp' twice: one dimension can be shared out"):
        pc.annotate({"up": ("tp", "tp")})
