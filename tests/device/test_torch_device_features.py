"""What torch's trainings use beside parallel models, on a device, beside the same on the CPU:
convolutions, synchronised batch normalisation, 16-bit dtypes, GradScaler, and checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import marks  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch_device_ranks import run_in_turn, same  # noqa: E402

pytestmark = marks.TORCH
CPU = torch.device("cpu")
DDP = nn.parallel.DistributedDataParallel


def network(*, normalised: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6) if normalised else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(6, 4, 3),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def images(step: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, 2, 6, 6, generator=draw).to(device)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, x in model.state_dict().items():
        found[name] = getattr(x, "full_tensor", lambda x=x: x)().detach().cpu().clone()
    return found


def equal_on_both(device: torch.device, train: Callable[[torch.device], Any]) -> None:
    found, expected = train(device), train(CPU)
    for name, value in expected.items():
        exact = {"rtol": 0, "atol": 0} if device.type != "cuda" else {}
        torch.testing.assert_close(found[name], value, **exact)


def convolutions_and_synchronised_batch_norm(device: torch.device) -> None:
    from pycoll.torch.sync_batch_norm import SyncBatchNorm

    def train(place: torch.device) -> dict[str, torch.Tensor]:
        model = DDP(SyncBatchNorm.convert(network(normalised=True)).to(place))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(images(step, place)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model.module)

    equal_on_both(device, train)


class Half(nn.Module):
    """Computes in float16 with weights of float32, whose gradients are float32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(normalised=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: p.half() for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, x.half()).float()


def scaler_skips_an_overflow_of_one_rank_on_all(device: torch.device) -> None:
    def train(place: torch.device) -> dict[str, torch.Tensor]:
        model = DDP(Half().to(place))
        scaler = torch.amp.GradScaler(place.type, init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            before = state_of(model)
            loss = model(images(step, place)).square().mean()
            factor = torch.inf if step == 1 and dist.get_rank() == 0 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            weight = "module.inner.5.weight"
            assert torch.equal(state_of(model)[weight], before[weight]) == (step == 1)
        assert scaler.get_scale() == 32.0
        return state_of(model)

    equal_on_both(device, train)


def sharded(place: torch.device, **policy: Any) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    model = network(normalised=False).to(place)
    model = fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def steps(model: Any, optimizer: Any, place: torch.device, which: range) -> None:
    for step in which:
        model(images(step, place)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bfloat16_of_fsdp2(device: torch.device) -> None:
    def train(place: torch.device) -> dict[str, torch.Tensor]:
        model, optimizer = sharded(place, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        steps(model, optimizer, place, range(3))
        return state_of(model)

    equal_on_both(device, train)


def checkpoints_of_shards_move_to_the_cpu_and_back(device: torch.device) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def train(places: list[torch.device], folder: Path) -> dict[str, torch.Tensor]:
        for number, place in enumerate(places):
            model, optimizer = sharded(place)
            weights, moments = get_state_dict(model, optimizer)
            state = {"weights": weights, "moments": moments}
            if number:
                dcp.load(state, checkpoint_id=folder / f"{number - 1}")
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["weights"],
                    optim_state_dict=state["moments"],
                )
            steps(model, optimizer, place, range(2 * number, 2 * number + 2))
            weights, moments = get_state_dict(model, optimizer)
            state = {"weights": weights, "moments": moments}
            dcp.save(state, checkpoint_id=folder / f"{number}")
        return state_of(model)

    names: list[Any] = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(names, device=CPU)
    folder = Path(names[0])
    expected = train([CPU] * 3, folder / "cpu")
    found = train([device, CPU, device], folder / "mixed")
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    for name, value in expected.items():
        exact = device.type != "cuda"
        same(found[name], value) if exact else torch.testing.assert_close(found[name], value)


def test_trainings_have_the_bits_of_the_cpu(kind):
    run_in_turn(
        kind,
        2,
        convolutions_and_synchronised_batch_norm,
        scaler_skips_an_overflow_of_one_rank_on_all,
        bfloat16_of_fsdp2,
        checkpoints_of_shards_move_to_the_cpu_and_back,
    )
