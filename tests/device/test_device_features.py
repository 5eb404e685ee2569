"""Precision, overflows, convolutions, batch normalisation and torch's checkpoints of trainers, on a
device, beside the same on the CPU."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

import marks  # noqa: E402
import torch._dynamo  # noqa: E402, F811 - torch's optimizers import it in each rank: seconds
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch_emulated  # noqa: E402
from mesh_cases import differences  # noqa: E402
from torch import nn  # noqa: E402

import pycoll  # noqa: E402
from pycoll import parallel as pc  # noqa: E402
from pycoll.parallel.core.object_collectives import gather_objects  # noqa: E402

pytestmark = marks.TRAINERS


def made(mesh: pc.Mesh, plan: dict[str, str], **options: Any) -> tuple[Any, Any]:
    """An image classifier with convolutions and batch normalisation, and its optimizer."""
    with pc.keyed_init(mesh, seed=3):
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3),
            nn.Flatten(),
            nn.Linear(64, 5),
        )
    if "precision" not in options:
        model = model.double()
    model = pc.parallelize(model, mesh, tp=plan, **options)
    kind = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, pc.optimizer(kind, clip=1.0)


def data(steps: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(6, 2, 6, 6, generator=draw).to(dtype) for _ in range(steps)]
    return [(x, torch.randint(5, (6,), generator=draw)) for x in images]


def convolutions(comm: pycoll.Communicator, device: str | None) -> list[Any]:
    found = []
    for sizes, plan, zero in (
        ({"dp": -1}, {}, 0),
        ({"dp": -1}, {}, 3),
        ({"tp": -1, "dp": 1}, {"0": "conv_out", "3": "conv_in"}, 0),
        ({"tp": -1, "dp": 1}, {"0": "conv_space"}, 0),
    ):
        mesh = pc.mesh(**sizes, comm=comm, device=device)
        model, optimizer = made(mesh, plan, zero=zero)
        losses = []
        for x, y in pc.shard(data(3, torch.float64), mesh):
            losses.append(model.step(x, y, loss=nn.functional.cross_entropy).loss)
            optimizer.step()
        weights = {name: w.cpu() for name, w in pc.whole_weights(model).items()}
        statistics = {name: x.detach().cpu().clone() for name, x in model.named_buffers()}
        found.append([losses, weights, statistics])
        mesh.close()
    return found


def overflow(comm: pycoll.Communicator, device: str | None) -> list[Any]:
    """float16 whose gradient on rank 0 alone is infinite in step 1, and bfloat16."""
    found = []
    for precision, zero in (("fp16", 0), ("fp16", 3), ("bf16", 0), ("bf16", 3)):
        mesh = pc.mesh(dp=-1, comm=comm, device=device)
        model, optimizer = made(mesh, {}, precision=precision, zero=zero)
        bad = [False]
        model[5].weight.register_hook(lambda g: g * torch.inf if bad[0] and comm.rank == 0 else g)  # noqa: B023
        scaler = pc.GradScaler(mesh.device.type, init_scale=64.0) if precision == "fp16" else None
        for step, (x, y) in enumerate(pc.shard(data(4, torch.float32), mesh)):
            bad[0] = step == 1 and scaler is not None
            out = model.step(x, y, loss=pc.cross_entropy, scaler=scaler)
            optimizer.step()
            assert out.skipped == bad[0], (precision, zero, step)
            found.append([out.loss, out.grad_norm if not bad[0] else 0.0])
        if scaler is not None:
            assert scaler.get_scale() == 32.0
        found.append({name: w.cpu() for name, w in pc.whole_weights(model).items()})
        mesh.close()
    return found


def torchs_checkpoints(comm: pycoll.Communicator, device: str | None) -> list[Any]:
    """Trained, saved by torch.distributed.checkpoint, and trained further on the CPU."""
    with tempfile.TemporaryDirectory() as own:
        folder = gather_objects(own, comm)[0]
        for place, steps in ((device, slice(0, 2)), (None, slice(2, 4))):
            mesh = pc.mesh(dp=-1, comm=comm, device=place)
            model, optimizer = made(mesh, {}, zero=3)
            if steps.start:
                state = {"model": pc.state_dict(model), "steps": pc.optimizer_state_dict(optimizer)}
                dcp.load(state, checkpoint_id=f"{folder}/state")
                pc.load_state_dict(model, state["model"])
                pc.load_optimizer_state_dict(optimizer, state["steps"])
            for x, y in pc.shard(data(4, torch.float64)[steps], mesh):
                model.step(x, y, loss=nn.functional.cross_entropy)
                optimizer.step()
            state = {"model": pc.state_dict(model), "steps": pc.optimizer_state_dict(optimizer)}
            dcp.save(state, checkpoint_id=f"{folder}/state")
            weights = {name: w.cpu() for name, w in pc.whole_weights(model).items()}
            mesh.close()
        comm.barrier()
    return [weights]


def test_features_of_trainers_have_the_bits_of_the_cpu(kind, tmp_path):
    def rank(comm: pycoll.Communicator) -> list[str]:
        if kind == torch_emulated.NAME:
            torch_emulated.install()
        torch.set_num_threads(1)
        comm.deterministic = True  # sums do not depend on where the arrays are
        dist.init_process_group(
            "pycoll", init_method=f"file://{tmp_path}/store", rank=comm.rank, world_size=comm.size
        )
        tolerance, wrong = 0.0 if kind == torch_emulated.NAME else 1e-8, []
        for work in (convolutions, overflow, torchs_checkpoints):
            pairs = differences(work(comm, None), work(comm, kind), tolerance)
            wrong += [f"{work.__name__}: {text}" for text in pairs]
        dist.destroy_process_group()
        return wrong

    for wrong in pycoll.run_ranks(rank, 2, timeout_s=120):
        assert not wrong, "\n".join(wrong)
