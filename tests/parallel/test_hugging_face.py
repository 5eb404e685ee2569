"""Unchanged models of the library transformers, parallelized by a plan, equal one process."""

from __future__ import annotations

import functools

import pytest
import torch
from mesh_cases import assert_equal_one_process, assert_refused, fit, one_process

from pycoll import parallel as pc

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

VOCAB, STEPS = 67, 3


def llama(attention="eager", tied=False):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=44, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=16,
        use_cache=False, attn_implementation=attention, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=8, n_positions=16, resid_pdrop=0.1,
        embd_pdrop=0.1, attn_pdrop=0.0, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def by_their_plan(kind: str):
    """A small random model of a family, for the plan that transformers has for it."""
    experts = {"num_local_experts": 4, "experts_implementation": "eager"}  # others lack float64
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=44, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=16, use_cache=False,
        head_dim=4, **(experts if kind == "Mixtral" else {}),
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


PLANS = {
    llama: ("model.layers", {
        "*.q_proj|*.k_proj|*.v_proj|*.gate_proj|*.up_proj": "col", "*.o_proj|*.down_proj": "row",
        "*.self_attn|*.mlp": "region", "model.embed_tokens|lm_head": "vocab",
    }),
    gpt2: ("transformer.h", {
        "*.c_attn": "qkv", "*.c_fc": "col", "*.c_proj": "row",
        "*.attn|*.mlp": "region", "transformer.wte|lm_head": "vocab",
    }),
}  # fmt: skip


def in_parts(output, target):
    return pc.cross_entropy(output.logits, target)


in_parts.takes_parts = True  # as pc.cross_entropy does


def of_whole_logits(output, target):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def train(comm, sizes, make, loss=in_parts, masked=False, **options):
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (4, 9), generator=random)
    inputs = {"input_ids": tokens[:, :-1]}
    if masked:
        inputs["attention_mask"] = torch.ones(4, 8).long()
        inputs["attention_mask"][0, 5:] = 0
    data = [(inputs, tokens[:, 1:])] * STEPS  # learned by heart
    blocks, plan = PLANS.get(make.func) or ("model.layers", pc.tp_plan(make()))
    model = lambda: make().train()  # noqa: E731
    return fit(comm, sizes, model, data, loss=loss, tp=plan, pp=blocks, **options)


def test_models_by_plan_equal_one_process():
    eager = functools.partial(llama)
    sdpa = functools.partial(llama, "sdpa")
    cases = [
        ({"cp": 2}, {"zero": 3}, {"make": sdpa}),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "recompute": True}, {"make": sdpa}),
        ({"cp": 2, "pp": 2}, {}, {"make": sdpa}),
    ]
    for make in (eager, functools.partial(gpt2)):
        cases += [
            ({"tp": 2}, {"loss": of_whole_logits, "sequence_parallel": True}, {"make": make}),
            ({"dp": 2}, {"zero": 3, "recompute": True}, {"make": make}),
            ({"dp": 2, "tp": 2, "pp": 2}, {"zero": 1}, {"make": make}),
        ]
    tied = {"make": functools.partial(llama, tied=True), "masked": True}
    masked = {"make": functools.partial(gpt2), "masked": True}
    cases += [({"pp": 2}, {"schedule": "zbv"}, tied), ({"pp": 4}, {"schedule": "zb1p"}, masked)]
    assert_equal_one_process(train, cases)
    losses = one_process(train, make=eager)[0]
    assert losses[-1] < losses[0]


def test_models_by_the_plan_of_transformers_equal_one_process():
    """A Qwen2 has biases, a Qwen3 norms of heads, a Mixtral experts; a Llama is tested above."""
    makes = {k: functools.partial(by_their_plan, k) for k in ("Qwen2", "Qwen3", "Mixtral")}
    cases = [({"tp": 2}, {}, {"make": makes[kind]}) for kind in ("Qwen2", "Qwen3")]
    cases.append(({"tp": 2}, {"sequence_parallel": True}, {"make": makes["Qwen2"]}))
    assert_equal_one_process(train, cases)
    # The router's softmax is in float32, also in a model in float64.
    assert_equal_one_process(train, [({"tp": 2}, {}, {"make": makes["Mixtral"]})], tolerance=1e-6)
    plan = pc.tp_plan(makes["Mixtral"]())
    assert plan["model.layers.0.mlp.experts"] == "packed"
    ranks = pc.memory(makes["Mixtral"](), {"tp": 2}, tp=plan)
    alone = pc.memory(makes["Mixtral"](), {})[0].parameters
    assert alone / 2 < ranks[0].parameters < 0.55 * alone


def test_experts_that_cannot_be_packed_are_refused():
    make = functools.partial(by_their_plan, "Mixtral")

    def of(pattern, **options):
        plan = {pattern: "packed"}
        return lambda mesh: pc.parallelize(make(), mesh, tp=plan, pp="model.layers", **options)

    assert_refused(
        {
            "layers.0.mlp' (MixtralSparseMoeBlock) cannot be packed: expected gate_up_proj": (
                of("*.mlp")
            ),
            "packed experts need all tokens: leave sequence_parallel out": of(
                "*.experts", sequence_parallel=True
            ),
        },
        tp=2,
    )
