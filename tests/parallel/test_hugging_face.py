"""Models of transformers by plan, with no change to their code: parity with one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

VOCAB, STEPS = 67, 5


def llama(attention="eager"):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=44, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=16,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=8, n_positions=16, resid_pdrop=0.1,
        embd_pdrop=0.1, attn_pdrop=0.0, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


PLANS = {
    llama: (
        "model.layers",
        {
            "*.q_proj|*.k_proj|*.v_proj|*.gate_proj|*.up_proj": "col",
            "*.o_proj|*.down_proj": "row",
            "*.self_attn|*.mlp": "region",
            "model.embed_tokens|lm_head": "vocab",
        },
    ),
    gpt2: (
        "transformer.h",
        {
            "*.c_attn": "qkv",
            "*.c_fc": "col",
            "*.c_proj": "row",
            "*.attn|*.mlp": "region",
            "transformer.wte|lm_head": "vocab",
        },
    ),
}


def in_parts(output, target):
    return pc.cross_entropy(output.logits, target)


in_parts.takes_parts = True  # as pc.cross_entropy does


def of_whole_logits(output, target):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def train(comm, make, loss, sizes: dict, options: dict, *attention):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=1):
        model = make(*attention).train()
    blocks, plan = PLANS[make]
    model = pc.parallelize(model, mesh, tp=plan, pp=blocks, **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip=1.0)
    random = torch.Generator().manual_seed(3)
    losses = []
    data = [torch.randint(VOCAB, (4, 9), generator=random)] * STEPS  # learned by heart
    for x, y in pc.shard([({"input_ids": t[:, :-1]}, t[:, 1:]) for t in data], mesh):
        losses.append(model.step(x, y, loss=loss, microbatches=2).loss)
        optimizer.step()
    return losses, pc.whole_weights(model)


@pytest.mark.parametrize("make", PLANS)
def test_model_by_plan_equals_one_process(make):
    losses, weights = run_ranks(train, 1, make, in_parts, {}, {})[0]
    assert losses[-1] < losses[0]
    for n, loss, sizes, options in (
        (2, of_whole_logits, {"tp": 2}, {"sequence_parallel": True}),
        (2, in_parts, {"dp": 2}, {"zero": 3, "recompute": True}),
        (8, in_parts, {"tp": 2, "pp": 2}, {"zero": 1}),
    ):
        for got in run_ranks(train, n, make, loss, sizes, options):
            assert all(abs(a - b) <= 1e-10 for a, b in zip(losses, got[0], strict=True))
            for name, weight in weights.items():
                assert (weight - got[1][name]).abs().max() <= 1e-10, (sizes, name)


def test_llama_of_cut_sequences_equals_one_process():
    losses, weights = run_ranks(train, 1, llama, in_parts, {}, {}, "sdpa")[0]
    for n, sizes, options in (
        (2, {"dp": 1, "cp": 2}, {"zero": 3}),
        (4, {"cp": 2, "tp": 2}, {"sequence_parallel": True, "recompute": True}),
        (4, {"cp": 2, "pp": 2}, {}),
    ):
        for got in run_ranks(train, n, llama, in_parts, sizes, options, "sdpa"):
            assert all(abs(a - b) <= 1e-10 for a, b in zip(losses, got[0], strict=True))
            for name, weight in weights.items():
                assert (weight - got[1][name]).abs().max() <= 1e-10, (sizes, name)
