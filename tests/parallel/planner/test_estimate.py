"""Operations of published models, and what an estimate of a step says."""

from __future__ import annotations

import pytest
import torch
from published_models import alexnet, resnet50, vgg16
from tiny_gpt import GPT
from torch import nn

from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.topology import Device

pytestmark = pytest.mark.pure

SLOW_MEMORY = Device(flops_per_s=1e12, memory_bytes_per_s=1e9)
FAST = Device(flops_per_s=1e12, memory_bytes_per_s=1e15, attained=0.5)


@pytest.mark.parametrize(
    "make, multiplications, weights",
    [(alexnet, 714.2e6, 61_100_840), (vgg16, 15.47e9, 138_357_544), (resnet50, 4.089e9, None)],
)
def test_operations_of_convolution_nets_are_the_published_ones(make, multiplications, weights):
    """Multiply-adds of one image of 224 x 224, as torchvision's model pages state them."""
    with torch.device("meta"):
        model = make()
    found = pc.flops(model, torch.zeros(1, 3, 224, 224))
    assert found.forward == pytest.approx(2 * multiplications, rel=0.01)
    if weights is not None:
        assert sum(p.numel() for p in model.parameters()) == weights


def gpt(**options) -> nn.Module:
    with torch.device("meta"):
        return GPT(vocab=512, dim=64, depth=3, heads=4, context=32, fused=True, drop=0, **options)


X = torch.zeros(4, 32, dtype=torch.int64)


def test_estimate_of_a_gpt_has_the_times_of_its_operations():
    """With fast memory, seconds are operations over the rate, in every pass."""
    counted, found = pc.flops(gpt(), X), pc.estimate(gpt(), X, FAST)
    assert found.model.flops == {
        "forward": counted.forward,
        "backward": counted.backward,
        "recomputed": 0,
    }
    assert found.seconds == pytest.approx(counted.total / 0.5e12, rel=1e-3)
    assert found.mfu == pytest.approx(0.5, rel=1e-3)
    assert found.by_layer["head"].total_flops == sum(counted.by_layer["head"])
    slow = pc.estimate(gpt(), X, SLOW_MEMORY)
    assert slow.seconds == pytest.approx(sum(slow.model.nbytes.values()) / 1e9, rel=0.02)
    assert "bound by memory traffic" in slow.bottleneck
    assert "bound by arithmetic" in found.bottleneck and "blocks.*." in found.bottleneck


def test_recomputation_is_a_pass_of_its_own_and_saves_activations():
    plain = pc.estimate(gpt(), X, FAST)
    again = pc.estimate(gpt(), X, FAST, recompute="full", pp="blocks")
    blocks = sum(plain.by_layer[f"blocks.{i}"].flops["forward"] for i in range(3))
    # The last layer of a block is not computed again: its output is not needed.
    assert 0.6 * blocks < again.model.flops["recomputed"] <= blocks
    assert again.model.flops["backward"] == plain.model.flops["backward"]
    assert again.activations < plain.activations / 2
    assert "recomputed" in again.table() and "blocks.1" in again.table()


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_depends_on_values_is_refused_with_its_operator():
    with pytest.raises(UsageError, match=r"Branches cannot be traced.*behind aten\.gt"):
        pc.flops(Branches(), torch.ones(3))
    with pytest.raises(UsageError, match="device is 3: expected a pycoll.topology.Device"):
        pc.estimate(gpt(), X, 3)
