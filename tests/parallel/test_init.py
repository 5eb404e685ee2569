"""Random numbers by place, and initial weights that depend on their names alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pycoll import parallel as pc
from pycoll.parallel import random

pytestmark = [pytest.mark.torch, pytest.mark.pure]


def test_words_of_a_part_are_those_of_the_whole():
    whole = random.words("a stream", 0, 1000)
    for start, count in ((0, 1), (1, 7), (4, 4), (997, 3), (500, 0)):
        assert np.array_equal(random.words("a stream", start, count), whole[start : start + count])
    assert not np.array_equal(random.words("another", 0, 1000), whole)


def test_numbers_are_distributed_as_they_say():
    numbers = random.normal("n", (200_000,), mean=1.0, std=2.0)
    assert numbers.mean() == pytest.approx(1.0, abs=0.02)
    assert numbers.std() == pytest.approx(2.0, abs=0.02)
    numbers = random.uniform("u", (200_000,), -1.0, 3.0)
    assert -1 < numbers.min() < -0.999 and 2.999 < numbers.max() < 3
    for drop in (0.0, 0.1, 0.5, 1.0):
        kept = random.keep_mask("m", 0, 100_000, drop).double().mean()
        assert kept == pytest.approx(1 - drop, abs=0.01)


class Net(nn.Module):
    def __init__(self, more: bool) -> None:
        super().__init__()
        if more:
            self.more = nn.Linear(3, 3)
        self.linear, self.embedding = nn.Linear(4, 5), nn.Embedding(7, 4, padding_idx=2)
        self.list = nn.ModuleList(nn.Conv2d(2, 3, 3) for _ in range(2))
        self.made = nn.Parameter(torch.randn(3) * 0.1)
        nn.init.trunc_normal_(self.linear.weight, std=0.5, a=-0.7, b=0.7)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embedding.weight


def test_weights_depend_on_names_and_seed_alone():
    def make(more: bool, seed: int) -> dict:
        with pc.keyed_init(seed=seed):
            net = Net(more)
        return {name: p.detach() for name, p in net.named_parameters()}

    one, other, third = make(False, 0), make(True, 0), make(False, 1)
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
        assert not torch.equal(weight, third[name]), name
    assert not one["embedding.weight"][2].any()  # the padding stays zero
    assert one["linear.weight"].abs().max() <= 0.7
    assert not torch.equal(one["list.0.weight"], one["list.1.weight"])


def test_torch_is_as_it_was_after_keyed_init():
    kept = nn.init.trunc_normal_
    with pytest.raises(ValueError), pc.keyed_init():
        raise ValueError
    assert nn.init.trunc_normal_ is kept
    torch.manual_seed(0)
    first = nn.Linear(3, 3).weight
    torch.manual_seed(0)
    assert torch.equal(first, nn.Linear(3, 3).weight)
