"""Backward in two parts: gradients of inputs, then those of weights."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt import Block
from torch import nn

from pycoll.parallel.pipeline.backward import backward_inputs

pytestmark = [pytest.mark.pure, pytest.mark.torch]


class Shared(nn.Module):
    """One layer twice, one weight in two places, a weight before and after the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.gain, self.unused = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x):
        h = self.norm(torch.tanh(self.linear(x)) * self.gain)
        return torch.tanh(self.linear(h)) + self.gain.sin() * 2, (self.gain**2).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv, self.bias = nn.Conv1d(4, 4, 3, padding=1), nn.Parameter(torch.rand(1, 4))

    def forward(self, x):
        x = x + self.bias
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return (x + self.conv(x.transpose(1, 2)).transpose(1, 2),)


class NoInput(nn.Module):
    """Its output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 5, 4))

    def forward(self, x):
        return (self.weight.exp(),)


class MoreOutputs(nn.Module):
    """Nodes with several outputs, of which not all are used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        a, _, c = self.linear(x).chunk(3, -1)
        return self.rnn(a)[0] * c.sigmoid(), a.max(-1).values


class Transformer(Block):
    def __init__(self) -> None:
        super().__init__(dim=4, heads=2, drop=0.0, hidden=8)

    def forward(self, x):
        return (super().forward(x),)


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize("model", [Shared, Attention, NoInput, MoreOutputs, Transformer])
def test_split_backward_is_the_whole_one(model, with_input):
    torch.manual_seed(0)
    module = model().double()
    x = torch.randn(3, 5, 4).double()
    leaf = x.clone().requires_grad_(with_input)
    outputs = module(leaf)
    given = [torch.randn_like(out) for out in outputs]
    torch.autograd.backward(list(outputs), given)
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()

    again = x.clone().requires_grad_(with_input)
    outputs = module(again)
    inputs = [again] if with_input else []
    found, later = backward_inputs(list(outputs), given, inputs, list(module.parameters()))
    assert all(p.grad is None for p in module.parameters())  # no gradient of a weight yet
    later()
    if with_input:
        if leaf.grad is None:
            assert found[0] is None
        else:
            assert torch.allclose(found[0], leaf.grad, atol=1e-12, rtol=0)
    for name, parameter in module.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert torch.allclose(parameter.grad, expected[name], atol=1e-12, rtol=0), name


def test_weights_part_does_not_go_down_the_trunk_again():
    """W costs the weights' gradients alone: the nodes of the trunk below are not run."""
    ran = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ran.append(ctx.name)
            return grad, None

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    out = Spy.apply(second(Spy.apply(first(Spy.apply(x, "in")), "middle")), "out")
    weights = [*first.parameters(), *second.parameters()]
    _, later = backward_inputs([out], [torch.ones_like(out)], [x], weights)
    assert ran == ["out", "middle", "in"]
    later()
    assert ran == ["out", "middle", "in"]
