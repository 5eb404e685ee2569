"""Replicas that differ, and parameter servers, on a device's tensors: the CPU's bits in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import marks  # noqa: E402
import torch._dynamo  # noqa: E402, F811 - torch's optimizers import it in each rank: seconds
import torch_emulated  # noqa: E402
from torch import nn  # noqa: E402

import pycoll  # noqa: E402
from pycoll import parallel as pc  # noqa: E402

pytestmark = marks.TRAINERS
STEPS, WIDTH = 6, 96  # a vector of more than 64 KiB, which goes from device to device
# By `replicas=`: the copies of tensors between the host and a device in each step.
KINDS = {
    "gossip:graph=ring": 0,
    "gossip:mode=sgp": 0,
    "gossip:graph=ring,compress=int8": 0,
    "gossip:graph=ring,compress=topk:0.1": 0,
    "local:steps=2": 0,
    "local:steps=3,fragments=2,overlap=1,compress=int8": 0,
    "ps:mode=sync,servers=2": 2,  # weights come, gradients go
    "ps:mode=sync,compress=int8": 2,
}


def num_host_copies(device: str | None) -> int:
    if device != torch_emulated.NAME:
        return 0
    count: int = torch.get_device_module(device).num_host_copies()
    return count


def trained(comm: pycoll.Communicator, replicas: str, device: str | None) -> tuple[Any, list[int]]:
    """This replica's weights and the mean of all after steps on a device, and each step's copies to
    and from the host."""
    mesh = pc.mesh(dp=-1, comm=comm, device=device)
    with pc.keyed_init(mesh, seed=0):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    model = pc.parallelize(model, mesh, replicas=replicas)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    optimizer = pc.optimizer(inner)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4 * comm.size, WIDTH, dtype=torch.float64, generator=draw)
    y = torch.arange(len(x)) % 3
    copies = []
    for _ in range(STEPS):
        for batch_x, batch_y in pc.shard([(x, y)], mesh):
            model.step(batch_x, batch_y, loss=nn.functional.cross_entropy)
            before = num_host_copies(device)
            optimizer.step()
            copies.append(num_host_copies(device) - before)
    own = {name: w.detach().cpu().clone() for name, w in model.named_parameters()}
    with optimizer.mean_weights():
        mean = {name: w.detach().cpu().clone() for name, w in model.named_parameters()}
    optimizer.close()
    mesh.close()
    return (own, mean), copies


def replicas_have_the_bits(
    kinds: dict[str, int], kind: str, comm: pycoll.Communicator
) -> list[str]:
    wrong = []
    for replicas, most in kinds.items():
        expected, _ = trained(comm, replicas, None)
        found, copies = trained(comm, replicas, kind)
        if kind == torch_emulated.NAME and copies[1:] != [most] * (STEPS - 1):
            wrong.append(f"{replicas}: {copies} copies")
        for of_cpu, of_device in zip(expected, found, strict=True):
            for name, value in of_cpu.items():
                distance = (value - of_device[name]).abs().max().item()
                if distance > (0 if kind == torch_emulated.NAME else 1e-8):
                    wrong.append(f"{replicas}: {name} differs by {distance}")
    return wrong


def pairs_keep_the_sum(kind: str, comm: pycoll.Communicator) -> list[str]:
    """Their order depends on time, so there are no bits to compare."""
    mesh = pc.mesh(dp=-1, comm=comm, device=kind)
    group = mesh.line("dp")
    weight = nn.Parameter(torch.full((10_000,), float(comm.rank), device=mesh.device).double())
    inner = torch.optim.SGD([weight], lr=0.0)
    optimizer = pc.gossip(inner, pc.graph.ring(comm.size), "adpsgd", group=group)
    weight.grad = torch.zeros_like(weight)
    before = num_host_copies(kind)
    for _ in range(10):
        optimizer.step()
    comm.barrier()
    optimizer.close()
    wrong = [f"adpsgd: {count} copies" for count in [num_host_copies(kind) - before] if count]
    mean = group.all_reduce(weight.detach().clone()).cpu() / comm.size
    if (mean - (comm.size - 1) / 2).abs().max() > 1e-12:
        wrong.append(f"adpsgd: the mean is {mean[0]}")
    if (weight.detach() - comm.rank).abs().max() < 1e-3:
        wrong.append("adpsgd: weights stay")
    mesh.close()
    return wrong


def rows_of_a_table_are_trained(kind: str, comm: pycoll.Communicator) -> list[str]:
    """A table on the servers and layers on the device: the weights of the CPU."""
    found = []
    for device in ("cpu", kind):
        place = pc.mesh(comm=comm, device=device).device
        job = pc.ps.start(
            comm, colocated=True, optimizer=pc.ps.Adagrad(0.1), filters=[pc.ps.KKT(0)]
        )
        worker = job.worker
        assert worker is not None
        values = torch.linspace(-1, 1, 50 * 4).double().view(50, 4).to(place)
        table = worker.embedding("t", 50, 4, dtype=torch.float64, values=values)
        torch.manual_seed(0)
        layer = nn.Linear(4, 1, dtype=torch.float64)
        worker.register(layer.to(place))
        for step in range(4):
            worker.pull()
            rows = (torch.arange(6) * (step + 2 + comm.rank) % 50).to(place)
            layer(table(rows)).square().mean().backward()
            worker.push()
            worker.clock()
        worker.pull()
        everything = worker.pull_rows(table.table, torch.arange(50, device=place))
        found.append([everything, layer.weight.detach().cpu().clone()])
        job.close()
        comm.barrier()
    distance = max((a - b).abs().max().item() for a, b in zip(*found, strict=True))
    return [f"rows differ by {distance}"] if distance > 1e-12 else []


def on_ranks(kind: str, *works: Any) -> None:
    def rank(comm: pycoll.Communicator) -> list[str]:
        if kind == torch_emulated.NAME:
            torch_emulated.install()
        torch.set_num_threads(1)
        comm.deterministic = True  # sums do not depend on where the arrays are
        return [text for work in works for text in work(kind, comm)]

    for wrong in pycoll.run_ranks(rank, 4, timeout_s=120):
        assert not wrong, "\n".join(wrong)


def test_replicas_train_on_devices(kind):
    every = partial(replicas_have_the_bits, KINDS)
    on_ranks(kind, every, pairs_keep_the_sum, rows_of_a_table_are_trained)
