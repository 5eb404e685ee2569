"""FSDP2 trains as one process: every way it reduces, mixed precision, two-dimensional meshes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch_ranks import BACKEND, on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


def make_model() -> nn.Sequential:
    """Sizes that no number of ranks divides: shards are padded."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 23), nn.ReLU(), nn.Linear(23, 23), nn.ReLU(), nn.Linear(23, 3)
    )


def batch(step: int, n: int) -> torch.Tensor:
    return torch.randn(n, 5, 7, generator=torch.Generator().manual_seed(step))


def shard(model: nn.Module, prepare=None, **options) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    if prepare is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                prepare(module)
    return model


def train(mesh, prepare=None, gradient_scale: float = 1.0, **options) -> float:
    """How far off weights are after three steps; gradient_scale undoes what prepare changed."""
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = make_model()
    ours = shard(copy.deepcopy(alone), prepare, mesh=mesh, **options)
    optimizers = [
        torch.optim.SGD(ours.parameters(), lr=0.1 * gradient_scale),
        torch.optim.SGD(alone.parameters(), lr=0.1),
    ]
    for step in range(3):
        x = batch(step, n)
        ours(x[rank]).float().square().mean().backward()
        alone(x.flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = ours.state_dict()
    return max(
        (whole[name].full_tensor() - tensor).abs().max().item()
        for name, tensor in alone.state_dict().items()
    )


@on_ranks(2, 3)
def test_fully_shard_steps_as_one_process(rank, n):
    mesh, bf16 = init_device_mesh("cpu", (n,)), torch.bfloat16
    reduced_wide = MixedPrecisionPolicy(bf16, torch.float32)
    off = {
        "AVG": train(mesh),
        "SUM": train(mesh, lambda module: module.set_force_sum_reduction_for_comms(True)),
        "kept after forward": train(mesh, reshard_after_forward=False),
        "bf16": train(mesh, mp_policy=MixedPrecisionPolicy(bf16)) / 1e4,
        "bf16 reduced in f32": train(mesh, mp_policy=reduced_wide) / 1e4,
    }
    if BACKEND != "gloo":  # it has no PREMUL_SUM and allocates no tensors
        memory = FSDPModule.set_allocate_memory_from_process_group_for_comm
        off["divide factor"] = train(mesh, lambda m: m.set_gradient_divide_factor(3.0), 3.0 / n)
        off["memory of the group"] = train(mesh, lambda module: memory(module, True))
    assert max(off.values()) < 2e-6, off


@on_ranks(4)
def test_hybrid_sharding_reduces_within_and_between_groups(rank, n):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert train(mesh) < 2e-6
    assert train(mesh, lambda module: module.set_requires_all_reduce(True)) < 2e-6


@on_ranks(2)
def test_gradients_accumulate_without_and_with_reduction(rank, n):
    alone = make_model()
    ours = shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", (n,)))
    for step in range(3):
        ours.set_requires_gradient_sync(step == 2)
        ours(batch(step, n)[rank]).square().mean().backward()
        alone(batch(step, n).flatten(0, 1)).square().mean().backward()
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    assert max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs) < 1e-5


@on_ranks(2)
def test_clip_grad_norm_is_of_the_whole_model(rank, n):
    alone = make_model()
    ours = shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", (n,)))
    ours(batch(0, n)[rank]).square().mean().backward()
    alone(batch(0, n).flatten(0, 1)).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (ours, alone)]
    assert norms[0].full_tensor().item() == pytest.approx(norms[1].item(), rel=1e-5)
