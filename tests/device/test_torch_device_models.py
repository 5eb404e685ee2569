"""Models that torch makes parallel, on a device, beside the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import marks  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch_device_ranks import run_in_turn, same  # noqa: E402

pytestmark = marks.TORCH


def train(device: torch.device, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The parameters after three steps of a model that `wrap` made parallel."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10)
    ).to(device)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(8, 20, generator=generator).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in model.parameters()]


def close(got: list[torch.Tensor], expected: list[torch.Tensor], exact: bool) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exact else {}))


def ddp_trains_as_on_the_cpu(device: torch.device) -> None:
    wrap = torch.nn.parallel.DistributedDataParallel
    got = train(device, lambda model: wrap(model, bucket_cap_mb=0.001))
    expected = train(torch.device("cpu"), lambda model: wrap(model, bucket_cap_mb=0.001))
    close(got, expected, device.type != "cuda")


def fsdp2_trains_as_on_the_cpu(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(place: str) -> Callable[[Any], Any]:
        mesh = init_device_mesh(place, (dist.get_world_size(),))
        return lambda model: fully_shard(model, mesh=mesh)

    got = train(device, shard(device.type))
    close(got, train(torch.device("cpu"), shard("cpu")), device.type != "cuda")


def dtensor_moves_between_placements(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(4, 6)
    sharded = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    same(sharded.full_tensor().cpu(), whole)
    same(sharded.redistribute(mesh, [Shard(1)]).full_tensor().cpu(), whole)
    summed = sharded.sum(0)
    assert isinstance(summed.placements[0], Partial)
    same(summed.redistribute(mesh, [Replicate()]).to_local().cpu(), whole.sum(0))


def compiled_functional_collectives(device: torch.device) -> None:
    import torch.distributed._functional_collectives as functional

    # There is no code generator for the emulated device: what is traced is run as it is.
    compiler = "inductor" if device.type == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=compiler)
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    x = torch.full((16,), dist.get_rank() + 1.0, device=device)
    same(step(x).cpu(), torch.full((16,), 7.0))


def test_models_and_tensors_made_parallel(kind):
    run_in_turn(
        kind,
        2,
        ddp_trains_as_on_the_cpu,
        fsdp2_trains_as_on_the_cpu,
        dtensor_moves_between_placements,
        compiled_functional_collectives,
    )
