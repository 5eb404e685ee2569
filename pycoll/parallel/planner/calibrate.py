"""Rates of this machine, measured once: matrix products, memory, and collectives between ranks."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pycoll.bench.fit import Fit, fit_links
from pycoll.communicator import Communicator
from pycoll.launch import run_ranks
from pycoll.parallel.planner.estimate import estimate
from pycoll.topology import Device, Level, Topology

_SIDE = 768  # of the matrices
_MOVED = 1 << 25  # bytes of the array that is read and written
_SIZES = tuple(1 << k for k in range(10, 24, 2))
_WIDTH, _HEADS, _BATCH = 256, 8, (4, 128, 256)  # of the block of a transformer


class _Block(nn.Module):
    """A block of a transformer, whose operators are those of most models: products and others."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def calibrate(num_ranks: int = 2, *, repeats: int = 9) -> Topology:
    """Measures this machine: one thread of each rank, all ranks at the same time.

    Large products, a large array and many small operators give the rates of the device. Operators
    of a model attain a part of them: that part is measured with a training step of a block of a
    transformer, and both rates are scaled by it.

    Args:
        num_ranks: Number of ranks.
        repeats: Number of timed runs of each part; the median counts.

    Returns:
        A cluster of one host with a device, for `pc.plan` and `pc.estimate`.

    Raises:
        UsageError: `num_ranks` is below 1.

    Cost: a few seconds.
    """
    found = run_ranks(_rank, num_ranks, repeats)
    flops_per_s, memory_bytes_per_s, operator_s, step_s = (
        statistics.median(of[i] for of in found) for i in range(4)
    )
    device = Device(
        name="this machine, one thread a rank",
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        operator_s=operator_s,
        capacity_bytes=_memory() // num_ranks,
    )
    attained = min(1.0, estimate(_Block(), torch.zeros(_BATCH), device).seconds / step_s)
    device = replace(device, attained=attained, memory_bytes_per_s=memory_bytes_per_s * attained)
    link: Fit | None = found[0][4]
    level = Level(
        name="host",
        size=num_ranks,
        link_bytes_per_s=1 / link.beta_s_per_byte if link else 1e12,
        latency_s=link.alpha_s if link else 0.0,
    )
    gamma = link.gamma_s_per_byte if link else 0.0
    return Topology(levels=(level,), name="this host", device=device, gamma_s_per_byte=gamma)


def _memory() -> int:
    """Bytes of memory of this host."""
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _rank(comm: Communicator, repeats: int) -> tuple[float, float, float, float, Fit | None]:
    torch.set_num_threads(1)
    a = torch.rand(_SIDE, _SIDE)
    out = torch.empty(_SIDE, _SIDE)
    product_s = _median(lambda: torch.mm(a, a, out=out), comm, repeats)
    x = torch.zeros(_MOVED // 4)
    moved_s = _median(lambda: x.add_(1.0), comm, repeats)
    small = torch.zeros(8, requires_grad=True)

    def few() -> None:
        for _ in range(100):
            small.mul(2.0)

    call_s = _median(few, comm, repeats) / 100
    block, batch = _Block(), torch.rand(_BATCH)

    def step() -> None:
        block(batch).sum().backward()

    step_s = _median(step, comm, repeats)
    rates = 2 * _SIDE**3 / product_s, 2 * _MOVED / moved_s, call_s, step_s
    return *rates, _links(comm, repeats) if comm.size > 1 else None


def _links(comm: Communicator, repeats: int) -> Fit:
    """The links between ranks, by collectives of tensors that have just been written.

    Activations are such tensors: no rank knows them from an earlier call.
    """
    rows = []
    for nbytes in _SIZES:
        count = nbytes // 4 // comm.size * comm.size
        whole, part = torch.zeros(count), torch.zeros(count // comm.size)
        for name, x in (("all_reduce", whole), ("all_gather", part)):
            call = functools.partial(getattr(comm, name), x)
            write = functools.partial(x.add_, 1.0)
            rows.append((name, nbytes, _median(call, comm, repeats, before=write)))
    return fit_links(rows, comm.size)


def _median(
    call: Callable[[], Any],
    comm: Communicator,
    repeats: int,
    before: Callable[[], Any] = lambda: None,
) -> float:
    """Median seconds of a call on the slowest rank; `before` is not timed."""
    times = []
    for _ in range(repeats + 2):
        before()
        comm.barrier()
        start = time.perf_counter()
        call()
        took = np.array([time.perf_counter() - start])
        times.append(float(comm.all_reduce(took, op="max")[0]))
    return statistics.median(times[2:])


__all__ = ["calibrate"]
