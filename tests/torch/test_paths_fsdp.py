"""FSDP2 trains as one process: every way it reduces, mixed precision, two-dimensional meshes."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import BACKEND, run_with_group  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import (  # noqa: E402
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

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


@pytest.mark.parametrize("n", [2, 3])
def test_fully_shard_steps_as_one_process(n):
    def work() -> dict[str, float]:
        mesh = init_device_mesh("cpu", (n,))

        def sum_only(module):
            module.set_force_sum_reduction_for_comms(True)

        return {
            "AVG": train(mesh),
            "SUM": train(mesh, sum_only),
            "kept after forward": train(mesh, reshard_after_forward=False),
            "bf16": train(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16)) / 1e4,
            "bf16 reduced in f32": train(
                mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            )
            / 1e4,
        }

    for off in run_with_group(work, n):
        assert max(off.values()) < 2e-6, off


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo has no PREMUL_SUM")
def test_set_gradient_divide_factor_divides_within_the_reduce_scatter():
    def work() -> float:
        mesh = init_device_mesh("cpu", (2,))
        return train(mesh, lambda module: module.set_gradient_divide_factor(3.0), 3.0 / 2)

    assert max(run_with_group(work, 2)) < 2e-6


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo allocates no tensors")
def test_buffers_from_the_process_group_are_used():
    def work() -> float:
        mesh = init_device_mesh("cpu", (2,))
        return train(mesh, lambda m: m.set_allocate_memory_from_process_group_for_comm(True))

    assert max(run_with_group(work, 2)) < 2e-6


def test_hybrid_sharding_reduces_within_and_between_groups():
    def work() -> dict[str, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

        def last_of_two(module):
            module.set_requires_all_reduce(True)

        return {"plain": train(mesh), "all_reduce set": train(mesh, last_of_two)}

    for off in run_with_group(work, 4):
        assert max(off.values()) < 2e-6, off


def test_gradients_accumulate_without_and_with_reduction():
    def work() -> float:
        n, rank = dist.get_world_size(), dist.get_rank()
        alone = make_model()
        ours = shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", (n,)))
        for step in range(3):
            ours.set_requires_gradient_sync(step == 2)
            ours(batch(step, n)[rank]).square().mean().backward()
            alone(batch(step, n).flatten(0, 1)).square().mean().backward()
        pairs = zip(ours.parameters(), alone.parameters(), strict=True)
        return max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)

    assert max(run_with_group(work, 2)) < 1e-5


def test_clip_grad_norm_is_of_the_whole_model():
    def work() -> tuple[float, float]:
        n, rank = dist.get_world_size(), dist.get_rank()
        alone = make_model()
        ours = shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", (n,)))
        ours(batch(0, n)[rank]).square().mean().backward()
        alone(batch(0, n).flatten(0, 1)).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (ours, alone)]
        return norms[0].full_tensor().item(), norms[1].item()

    for ours, alone in run_with_group(work, 2):
        assert ours == pytest.approx(alone, rel=1e-5)
