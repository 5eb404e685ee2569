"""Places of modules that a search finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from placed_models import Mixed, Towers
from torch import nn

from pycoll import UsageError, topology
from pycoll import parallel as pc

DEVICE = topology.Device(flops_per_s=1e9, memory_bytes_per_s=1e9)
CLUSTER = replace(topology.uniform(8, latency_s=1e-6, link_bytes_per_s=1e9), device=DEVICE)


@pytest.mark.pure
def test_search_puts_equal_towers_on_ranks_of_their_own(capsys):
    model = Towers()
    model.tower_b = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 8))
    model.head = nn.Linear(16, 5)
    x = torch.zeros(4096, 6)
    found = {
        search: pc.auto_place(model, x, world=2, cluster=CLUSTER, search=search)
        for search in ("mcmc", "exhaustive")
    }
    for place in found.values():
        assert list(place) == ["stem", "tower_a", "tower_b", "head"]
        assert place["tower_a"] != place["tower_b"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == lines[3:] and lines[0].startswith("a step on 2 ranks: ")
    text = str(pc.ModulePlaces(model, {"tower_b": 1}, world=2))
    assert text == "rank 0: stem, tower_a, head\nrank 1: tower_b"


@pytest.mark.pure
def test_search_keeps_modules_that_share_a_parameter_together():
    place = pc.auto_place(Mixed(), torch.zeros(64, 6), world=2, cluster=CLUSTER, modules="*")
    assert place["head"] == place["tied"] and set(place.values()) == {0, 1}
    with pytest.raises(UsageError, match="leave none of 5 ranks without a parameter that learns"):
        pc.auto_place(Mixed(), torch.zeros(64, 6), world=5, cluster=CLUSTER)
