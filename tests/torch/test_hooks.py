"""Hooks that send fewer bytes: the same gradients on all ranks, as close as their bits allow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

# Relative to the largest gradient of the model: 2^-8 twice; half of a 127th.
ALLOWED = {"bf16": 2**-7, "int8": 1 / 127}


def register(model: DistributedDataParallel, hook: str, **options):
    from pycoll.torch import hooks

    if hook == "bf16":
        model.register_comm_hook(None, hooks.bf16_compress)
        return None
    state = hooks.Int8State(**options)
    model.register_comm_hook(state, hooks.int8_compress)
    return state


def make_model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(33, 70), nn.Tanh(), nn.Linear(70, 51), nn.Tanh(), nn.Linear(51, 7)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(8, 33, generator=random).to(dtype), torch.randn(8, 7, generator=random).to(
        dtype
    )


def gradients(model: nn.Module, step: int, dtype=torch.float32) -> torch.Tensor:
    model.zero_grad()
    x, y = batch(step, dtype)
    (model(x) - y).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("hook", ALLOWED)
@on_ranks(2, 3)
def test_hook_leaves_the_mean_as_close_as_its_bits_on_all_ranks(rank, n, hook):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        # Small buckets: several of them, and a layout that changes after the first step.
        plain = DistributedDataParallel(make_model(dtype), bucket_cap_mb=0.005)
        model = DistributedDataParallel(make_model(dtype), bucket_cap_mb=0.005)
        register(model, hook, **({"error_feedback": False} if hook == "int8" else {}))
        for step in range(3):
            expected = gradients(plain, step, dtype).double()
            found = gradients(model, step, dtype)
            of_all = [torch.empty_like(found) for _ in range(n)]
            dist.all_gather(of_all, found)
            assert all(torch.equal(found, other) for other in of_all)
            scale = expected.abs().max().item() * ALLOWED[hook]
            off = (found.double() - expected).abs().max().item()
            # Rounding of n ranks' gradients, each of which may be larger than the mean.
            assert off <= 4 * scale, (dtype, off, scale)
            assert off > 0 or dtype == torch.bfloat16  # compressed


@on_ranks(2)
def test_int8_error_feedback_lets_every_small_gradient_arrive(rank, n):
    """One element is 10,000 times the others: rounding alone would never send those."""
    for error_feedback, low, high in ((True, 0.75e-3, 1.25e-3), (False, 0, 0)):
        model = nn.Linear(200, 1, bias=False)
        ddp = DistributedDataParallel(model)
        register(ddp, "int8", error_feedback=error_feedback)
        x = torch.full((1, 200), 1e-3)
        x[0, 0] = 10.0
        total, steps = torch.zeros(200), 200
        for _ in range(steps):
            model.zero_grad()
            ddp(x).sum().backward()
            total += model.weight.grad[0]
        mean = (total[1:] / steps).mean().item()
        assert low <= mean <= high, (error_feedback, mean)


@pytest.mark.parametrize("hook", ALLOWED)
@on_ranks(2)
def test_hook_passes_nan_on_and_recovers(rank, n, hook):
    model = nn.Linear(300, 2, bias=False)
    ddp = DistributedDataParallel(model)
    register(ddp, hook)
    for step, finite in enumerate((True, False, True)):
        model.zero_grad()
        x = torch.ones(1, 300)
        if step == 1 and rank == 1:
            x[0, 7] = torch.inf
        ddp(x).sum().backward()
        assert bool(model.weight.grad.isfinite().all()) == finite, step


def test_int8_keeps_nothing_of_a_bucket_whose_parameters_changed():
    """DDP lays buckets out anew after the first step: the same index, other parameters."""
    from pycoll.torch.hooks import Int8State

    class Bucket:
        def __init__(self, parameters: list[torch.Tensor]) -> None:
            self.parameters = lambda: parameters
            self.index = lambda: 0

    a, b, state = torch.ones(2), torch.ones(2), Int8State()
    state._keep(Bucket([a, b]), torch.full((4,), 0.25))
    assert state._lost_in(Bucket([a, b])).tolist() == [0.25] * 4
    assert state._lost_in(Bucket([b, a])) is None
