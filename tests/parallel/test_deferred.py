"""Models made on the device "meta": the weights of one process, without a whole model anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_gpt import GPT, PLAN
from torch import nn

import pycoll
from pycoll import parallel as pc

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


class Odd(nn.Module):
    """Parameters and buffers made in other ways than by torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.table = nn.Parameter(torch.randn(4, 3) * 0.1)
        noise = torch.empty(6, 2).normal_(0.0, 0.5)
        self.copied = nn.Parameter(torch.zeros(6, 2))
        self.copied.data.copy_(noise).mul_(2)
        self.up = nn.Linear(4, 6)
        nn.init.trunc_normal_(self.up.weight, std=0.1)
        with torch.no_grad():
            self.up.weight[2:4].zero_()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 4, 4))
        self.register_buffer("steps", torch.arange(7), persistent=False)


def made(cls: type[nn.Module], *, meta: bool) -> nn.Module:
    with torch.device("meta" if meta else "cpu"), pc.keyed_init(seed=3):
        return cls().double() if cls is Odd else cls(dim=16, depth=2)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() <= expected.keys() and found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def on_meshes(comm: pycoll.Communicator) -> None:
    for cls in (Odd, GPT):
        plain = dict(made(cls, meta=False).named_parameters())
        buffers = dict(made(cls, meta=False).named_buffers())
        plan = {"up": "col"} if cls is Odd else PLAN
        blocks = None if cls is Odd else "blocks"
        for zero, sizes in [(0, {}), (0, {"tp": 2}), (1, {}), (3, {}), (3, {"tp": 2})]:
            model = made(cls, meta=True)
            mesh = pc.mesh(dp=-1, comm=comm, **sizes)
            pc.parallelize(model, mesh, tp=plan, pp=blocks, zero=zero)
            same(pc.whole_weights(model), plain)
            for name, buffer in model.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
    model = made(GPT, meta=True)
    pc.parallelize(model, pc.mesh(pp=2, comm=comm), pp="blocks")
    same(pc.whole_weights(model), dict(made(GPT, meta=False).named_parameters()))
    with torch.device("meta"):
        model = GPT(dim=16, depth=2)
    with pytest.raises(pycoll.UsageError, match=r"'token.weight' is on the device 'meta'"):
        pc.parallelize(model, pc.mesh(comm=comm))


def test_weights_made_in_parts_are_those_of_one_process():
    pycoll.run_ranks(on_meshes, 2, timeout_s=60)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def start(comm: pycoll.Communicator, width: int) -> int:
    """Makes a model of 96 layers of `width` * `width` weights; returns their bytes."""
    with torch.device("meta"), pc.keyed_init(seed=1):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(96)])
    pc.parallelize(model, pc.mesh(comm=comm), zero=3)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def peak_share(comm: pycoll.Communicator) -> float:
    """The peak of memory while the model is made, over the size of the model."""
    torch.set_num_threads(1)
    start(comm, 8)  # imports what the start needs
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
    nbytes = start(comm, 512)
    return (status("VmHWM") - before) / nbytes


def test_start_of_zero_3_on_4_ranks_takes_a_third_of_the_model():
    """Two seconds: 100 MB, of which each rank keeps a quarter, and one bucket of 4 MiB whole."""
    shares = pycoll.run_ranks(peak_share, 4, timeout_s=60)
    assert max(shares) <= 0.35, shares
