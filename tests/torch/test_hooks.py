"""Hooks that send fewer bytes: the same gradients on all ranks, as close as their bits allow."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import run_with_group  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

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
@pytest.mark.parametrize("n", [2, 3])
def test_hook_leaves_the_mean_as_close_as_its_bits_on_all_ranks(hook, n):
    def work() -> float:
        worst = 0.0
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
                worst = max(worst, off / scale)
        return worst

    assert max(run_with_group(work, n)) > 0


def test_int8_error_feedback_lets_every_small_gradient_arrive():
    """One element is 10,000 times the others: rounding alone would never send those."""

    def work(error_feedback: bool) -> float:
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
        return (total[1:] / steps).mean().item()

    with_feedback = run_with_group(work, 2, True)
    assert with_feedback == pytest.approx([1e-3, 1e-3], rel=0.25)
    assert run_with_group(work, 2, False) == [0.0, 0.0]


@pytest.mark.parametrize("hook", ALLOWED)
def test_hook_passes_nan_on_and_recovers(hook):
    def work() -> list[bool]:
        model = nn.Linear(300, 2, bias=False)
        ddp = DistributedDataParallel(model)
        register(ddp, hook)
        finite = []
        for step in range(3):
            model.zero_grad()
            x = torch.ones(1, 300)
            if step == 1 and dist.get_rank() == 1:
                x[0, 7] = torch.inf
            ddp(x).sum().backward()
            finite.append(bool(model.weight.grad.isfinite().all()))
        return finite

    assert run_with_group(work, 2) == [[True, False, True]] * 2


@pytest.mark.parametrize("hook", ALLOWED)
def test_hook_trains_to_the_loss_of_plain_ddp(hook):
    def work() -> tuple[float, float]:
        losses = []
        for use_hook in (False, True):
            model = make_model()
            ddp = DistributedDataParallel(model)
            if use_hook:
                register(ddp, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            for step in range(60):
                optimizer.zero_grad()
                x, y = batch(step % 2)
                loss = (ddp(x) - y).square().mean()
                loss.backward()
                optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / 2)
        return losses[0], losses[1]

    for plain, compressed in run_with_group(work, 2):
        assert compressed == pytest.approx(plain, rel=0.02)


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
