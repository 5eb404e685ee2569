"""Optimizers with norms of tensors: on pieces, they give the weights of one process."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import assert_equal_one_process, fit
from tiny_gpt import GPT, PLAN, batches
from torch import nn

from pycoll import UsageError
from pycoll import parallel as pc


def groups(model: nn.Module):
    """Biases and norms step without norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "adapt": False, "weight_decay": 0.0},
    ]


KINDS = {
    "LAMB": lambda model: pc.optim.LAMB(groups(model), lr=0.02, weight_decay=0.1),
    "LARS": lambda model: pc.optim.LARS(groups(model), lr=0.5, weight_decay=0.1, trust=0.02),
}


def train(comm, sizes, kind, **options):
    options.setdefault("pp", "blocks")
    data = batches(4, 8)
    return fit(comm, sizes, GPT, data, tp=PLAN, optimizer=KINDS[kind], **options)


def test_norms_over_pieces_are_those_of_whole_tensors():
    cases = [({"dp": 2}, {"zero": 3}, {"kind": "LAMB"}), ({"tp": 2}, {}, {"kind": "LARS"})]
    assert_equal_one_process(train, cases)


@pytest.mark.slow
def test_norms_over_pieces_are_those_of_whole_tensors_on_every_mesh():
    meshes = [
        ({"dp": 2}, {"zero": 0}),
        ({"dp": 2}, {"zero": 1, "bucket_mb": 0.01}),
        ({"dp": 2}, {"zero": 3}),
        ({"tp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
        ({"dp": 2, "pp": 2}, {"zero": 1}),
    ]
    assert_equal_one_process(train, [(*mesh, {"kind": kind}) for mesh in meshes for kind in KINDS])


def steps(optimizer_of, count=3):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = optimizer_of([weight])
    seen = [weight.detach().clone()]
    for _ in range(count):
        weight.grad = weight.detach().cos()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


def test_steps_have_the_length_of_the_papers():
    seen = steps(lambda params: pc.optim.LAMB(params, lr=0.1))
    for before, after in zip(seen, seen[1:], strict=False):
        assert torch.isclose((after - before).norm(), 0.1 * before.norm())
    first, second = steps(lambda params: pc.optim.LARS(params, lr=0.1, trust=0.5), count=1)
    assert torch.isclose((second - first).norm(), 0.1 * 0.5 * first.norm())
    assert torch.allclose(
        (second - first) / (second - first).norm(), -first.cos() / first.cos().norm()
    )


def test_steps_without_norms_are_those_of_torch():
    pairs = [
        (
            lambda p: pc.optim.LARS(p, lr=0.1, weight_decay=0.2, adapt=False),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
        ),
        (
            lambda p: pc.optim.LAMB(p, lr=0.1, weight_decay=0.2, eps=1e-8, adapt=False),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
        ),
    ]
    for ours, theirs in pairs:
        assert torch.allclose(steps(ours)[-1], steps(theirs)[-1], rtol=1e-12)


def test_bad_settings_are_refused():
    weight = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UsageError, match="lr is -1, expected 0 or more"):
        pc.optim.LAMB(weight, lr=-1)
    with pytest.raises(UsageError, match="momentum is 1, expected 0 or more and less than 1"):
        pc.optim.LARS(weight, lr=1, momentum=1)
