"""Models of the library transformers, unchanged, cut into stages: weights from their configs."""

from __future__ import annotations

import pytest
import torch
from models import batch
from torch.nn import functional

import pycoll
from pycoll.parallel import pipeline

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.torch]


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **{"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
    return transformers.GPT2LMHeadModel(config).double()


def llama(tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
        **{"use_cache": False, "tie_word_embeddings": tied},
    )
    return transformers.LlamaForCausalLM(config).double()


def loss_sum(output, target):
    losses = functional.cross_entropy(
        output.logits.flatten(0, 1), target.flatten(), reduction="sum"
    )
    return losses, target.numel()


@pytest.mark.parametrize(("p", "name"), [(2, "1f1b"), (4, "zb1p"), (2, "zbv")])
@pytest.mark.parametrize(
    ("make", "blocks"),
    [(gpt2, "transformer.h"), (llama, "model.layers"), (lambda: llama(True), "model.layers")],
    ids=["gpt2", "llama", "llama-tied"],
)
def test_model_of_transformers_trains_as_on_one_process(make, blocks, p, name):
    x, y = batch(6, length=8, vocab=50)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    inputs = {"input_ids": x, "attention_mask": mask}

    def rank(comm):
        model = make()
        schedule = pipeline.build(name, p, 3)
        cut = pipeline.cut(model, blocks, schedule.num_stages, schedule.stages_of(comm.rank))
        runtime = pipeline.PipelineRuntime(cut, name, comm, loss_fn=loss_sum)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(runtime.step(inputs, y, microbatches=3, scale=1 / y.numel()).loss)
            optimizer.step()
        return losses, {name: weight.detach() for name, weight in model.named_parameters()}

    outcomes = pycoll.run_ranks(rank, p, timeout_s=60)
    reference = make()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        total, count = loss_sum(reference(**inputs), y)
        (total / count).backward()
        optimizer.step()
        expected = float(total.detach()) / count
        assert [losses[step] for losses, _ in outcomes] == pytest.approx([expected] * p, abs=1e-12)
    weights = dict(reference.named_parameters(remove_duplicate=False))
    for _, here in outcomes:
        for key, weight in here.items():
            assert (weight - weights[key].detach()).abs().max() <= 1e-10, key
