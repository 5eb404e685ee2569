"""Data parallel beside torch's DistributedDataParallel over gloo, in turns, on real compute."""

from __future__ import annotations

import statistics
import tempfile
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

WIDTH, DEPTH, BATCH = 512, 6, 32


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                                                  nn.Linear(2 * WIDTH, WIDTH))
    ]  # fmt: skip
    return nn.Sequential(*layers)


def steps_of_ddp():
    model = nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x) -> None:
        functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_of_ours(comm):
    model = pc.parallelize(make(), pc.mesh(comm=comm))
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def step(x) -> None:
        model.step(x, x, loss=functional.mse_loss)
        optimizer.step()

    return step


@pytest.mark.slow
@pytest.mark.timing
def test_two_ranks_are_faster_than_ddp_over_gloo():
    def work(comm, folder: str):
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", comm.size)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        sides = {"gloo": steps_of_ddp(), "pycoll": steps_of_ours(comm)}
        x = torch.randn(BATCH, WIDTH)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(25):
            for name, step in sides.items():
                comm.barrier()
                start = time.monotonic()
                step(x)
                times[name].append(time.monotonic() - start)
        dist.destroy_process_group()
        return {name: statistics.median(taken[5:]) for name, taken in times.items()}

    with tempfile.TemporaryDirectory() as folder:
        medians = run_ranks(work, 2, folder)
    slowest = {name: max(m[name] for m in medians) for name in medians[0]}
    ratio = slowest["gloo"] / slowest["pycoll"]
    print({name: f"{s * 1e3:.1f} ms" for name, s in slowest.items()}, f"ratio {ratio:.2f}")
    assert ratio > 1
