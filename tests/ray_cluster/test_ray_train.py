"""Ray Train with the backend by its name trains as one process.

Slow: Ray needs 10 s to start two nodes, and Ray Train half a minute for its controller and workers.
"""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import torch

pytest.importorskip("ray.train.torch", reason="pip install 'pycoll[ray]' 'ray[train]'")

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import distributed as dist
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS, BATCH, NUM_RANKS = 20, 8, 4


def batches():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, BATCH, 6, generator=random, dtype=torch.float64)
    return zip(x, x.sum(2, keepdim=True), strict=True)


def made():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, rank, num_ranks):
    for x, y in batches():
        optimizer.zero_grad()
        error = model(x[rank::num_ranks]) - y[rank::num_ranks]
        error.square().mean().backward()
        optimizer.step()


def train_on_a_worker(config):
    model, optimizer = made()
    model = prepare_model(model)
    train(model, optimizer, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        weights = {name: p.detach() for name, p in model.module.named_parameters()}
        torch.save((dist.get_backend(), dist.get_world_size(), weights), config["file"])
    ray.train.report({})


def test_ray_train_trains_as_one_process(cluster, tmp_path):
    found = [point.name for point in importlib.metadata.entry_points(group="torch.backends")]
    if "pycoll" not in found:
        pytest.skip("pycoll is not installed, so that torch does not know its name")
    TorchTrainer(
        train_on_a_worker,
        train_loop_config={"file": str(tmp_path / "weights.pt")},
        torch_config=TorchConfig(backend="pycoll"),
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    backend, num_ranks, weights = torch.load(tmp_path / "weights.pt")
    assert (backend, num_ranks) == ("pycoll", NUM_RANKS)
    model, optimizer = made()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 0, 1)
    for (name, expected), start in zip(model.named_parameters(), before, strict=True):
        assert torch.allclose(weights[name], expected, rtol=0, atol=1e-10), name
        assert not torch.allclose(expected, start, rtol=0, atol=1e-3), name
