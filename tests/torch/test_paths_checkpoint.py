"""Distributed checkpoints: saved by some ranks, loaded by others, in another layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_ranks import init, on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    return {str(dtype): torch.arange(63).view(9, 7).to(dtype) for dtype in DTYPES}


@on_ranks(3, group=False)
def test_checkpoint_of_three_ranks_is_loaded_by_two_in_another_layout(rank, n, tmp_path):
    init(rank, n, tmp_path / "three")
    mesh = init_device_mesh("cpu", (n,))
    state = {k: distribute_tensor(t, mesh, [Shard(0)]) for k, t in tensors().items()}
    dcp.save({"sharded": state, "step": 7}, checkpoint_id=tmp_path / "saved")
    dist.destroy_process_group()
    if rank == 2:
        return
    init(rank, 2, tmp_path / "two")
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(1), Replicate()):
        state = {
            k: distribute_tensor(torch.zeros_like(t), mesh, [placement])
            for k, t in tensors().items()
        }
        whole = {"sharded": state, "step": 0}
        dcp.load(whole, checkpoint_id=tmp_path / "saved")
        assert whole["step"] == 7
        for name, tensor in tensors().items():
            assert torch.equal(state[name].full_tensor(), tensor), (name, placement)
    dist.destroy_process_group()


def make_model(mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@pytest.mark.parametrize("in_background", [False, True])
@on_ranks(2)
def test_fsdp_model_and_optimizer_resume(rank, n, in_background, tmp_path):
    mesh = init_device_mesh("cpu", (n,))
    model, optimizer = make_model(mesh)
    step(model, optimizer, 0)
    if in_background:
        dcp.async_save(states(model, optimizer), checkpoint_id=tmp_path).result()
    else:
        dcp.save(states(model, optimizer), checkpoint_id=tmp_path)
    step(model, optimizer, 1)

    again, its_optimizer = make_model(mesh)
    loaded = states(again, its_optimizer)
    dcp.load(loaded, checkpoint_id=tmp_path)
    parts = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
    set_state_dict(again, its_optimizer, **parts)
    step(again, its_optimizer, 1)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


@on_ranks(2)
def test_full_state_dict_is_gathered_to_and_broadcast_from_rank_0(rank, n):
    torch.manual_seed(rank)
    source, target = nn.Linear(6, 7), nn.Linear(6, 7)
    mesh = init_device_mesh("cpu", (n,))
    fully_shard(source, mesh=mesh)
    fully_shard(target, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(source, options=options)
    assert bool(whole) == (rank == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, whole, options=options)
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
