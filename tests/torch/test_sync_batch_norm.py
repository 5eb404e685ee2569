"""SyncBatchNorm on n ranks is BatchNorm of one process over all batches, gradients too."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import run_with_group  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

CHANNELS = 5
# Batches of each rank: even, uneven, some empty.
BATCHES = [(4, 4), (1, 6), (0, 5), (3, 0, 2), (1, 1, 0, 7)]
SHAPES = [(), (3,), (2, 3), (2, 1, 3)]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 6e-2,
    torch.float16: 6e-3,
}


def data_of_all(batches: tuple[int, ...], shape: tuple[int, ...], dtype) -> tuple:
    """Inputs with an offset that a sum of squares would cancel on, and gradients of the result."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(sum(batches), CHANNELS, *shape, generator=random, dtype=torch.float64)
    grad = torch.randn(x.shape, generator=random, dtype=torch.float64)
    # In every dtype both sides see the same values.
    return (3 * x + 10).to(dtype), grad.to(dtype)


def make_layer(cls, affine: bool, tracked: bool, momentum: float | None, dtype):
    layer = cls(
        CHANNELS, affine=affine, track_running_stats=tracked, momentum=momentum, dtype=dtype
    )
    if affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
            layer.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return layer


def step(layer, x, grad) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    found = {"output": output.detach(), "grad": x.grad}
    found |= {f"grad of {name}": p.grad for name, p in layer.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def work(cases: list[tuple]) -> float:
    """Largest difference, in units of what the dtype allows."""
    from pycoll.torch.sync_batch_norm import SyncBatchNorm

    rank, worst = dist.get_rank(), 0.0
    for batches, shape, dtype, affine, tracked, momentum in cases:
        x, grad = data_of_all(batches, shape, dtype)
        plain = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        wide = torch.float64
        alone = make_layer(plain[len(shape)], affine, tracked, momentum, wide)
        ours = make_layer(SyncBatchNorm, affine, tracked, momentum, dtype)
        begin = sum(batches[:rank])
        mine = slice(begin, begin + batches[rank])
        for _ in range(2):  # the second step moves running statistics that are not 0 and 1
            expected = step(alone, x.to(wide), grad.to(wide))
            found = step(ours, x[mine], grad[mine])
        for name in ("output", "grad"):
            expected[name] = expected[name][mine]
        for name, tensor in found.items():
            assert tensor.dtype == (torch.int64 if name.startswith("num") else dtype), name
            tensor = tensor.double()
            if name.startswith("grad of"):  # of the own batch: together they are the whole
                tensor = tensor.clone()
                dist.all_reduce(tensor)
            assert tensor.shape == expected[name].shape, name
            scale = max(1.0, expected[name].abs().max().item() if tensor.numel() else 1.0)
            off = (tensor - expected[name]).abs().max().item() / scale if tensor.numel() else 0.0
            assert off <= TOLERANCE[dtype], (name, off, batches, shape, dtype)
            worst = max(worst, off / TOLERANCE[dtype])
        # Evaluating: running statistics where there are some, else those of the own batch.
        alone.eval()
        ours.eval()
        if tracked and batches[rank]:  # here no rank waits for another
            off = (ours(x[mine]).double() - alone(x[mine].to(wide))).abs().max()
            assert off <= 10 * TOLERANCE[dtype], (batches, shape, dtype, off)
    return worst


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batches_of_all_ranks_give_the_result_of_one_process(batches):
    cases = [
        (batches, shape, dtype, affine, tracked, momentum)
        for shape in SHAPES
        for dtype in TOLERANCE
        for affine in (True, False)
        for tracked, momentum in [(True, 0.1), (True, None), (False, 0.1)]
    ]
    assert max(run_with_group(work, len(batches), cases)) <= 1


def test_one_value_per_channel_raises_on_every_rank():
    def work() -> str:
        from pycoll.torch.sync_batch_norm import SyncBatchNorm

        with pytest.raises(ValueError, match="more than 1 value per channel") as error:
            SyncBatchNorm(CHANNELS)(torch.ones(int(dist.get_rank() == 1), CHANNELS))
        return str(error.value)

    messages = run_with_group(work, 2)
    assert "(0, 5) on this rank" in messages[0]
    assert "(1, 5) on this rank" in messages[1]


def test_all_batches_empty_gives_an_empty_result_and_keeps_statistics():
    def work() -> tuple[tuple[int, ...], float]:
        from pycoll.torch.sync_batch_norm import SyncBatchNorm

        layer = SyncBatchNorm(CHANNELS)
        x = torch.empty(0, CHANNELS, 3, requires_grad=True)
        output = layer(x)
        output.sum().backward()
        return tuple(output.shape), layer.running_var.sum().item()

    assert run_with_group(work, 2) == [((0, CHANNELS, 3), CHANNELS)] * 2


def test_convert_takes_over_parameters_buffers_and_mode():
    from pycoll.torch.sync_batch_norm import SyncBatchNorm

    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4, eps=0.1, momentum=None),
        nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.SyncBatchNorm(6)),
        nn.BatchNorm3d(1, track_running_stats=False).eval(),
    )
    before = [model[1], model[2][0], model[2][1], model[3]]
    state = copy.deepcopy(model.state_dict())
    assert SyncBatchNorm.convert(model) is model
    after = [model[1], model[2][0], model[2][1], model[3]]
    for old, new in zip(before, after, strict=True):
        assert type(new) is SyncBatchNorm
        assert (new.weight is old.weight) and (new.running_mean is old.running_mean)
        assert (new.eps, new.momentum, new.training) == (old.eps, old.momentum, old.training)
    assert state.keys() == model.state_dict().keys()
    again = SyncBatchNorm.convert(model)
    assert again[1] is after[0]
    assert type(SyncBatchNorm.convert(nn.BatchNorm1d(3))) is SyncBatchNorm


def test_without_a_group_it_is_torch_s_own():
    from pycoll.torch.sync_batch_norm import SyncBatchNorm

    x = torch.arange(24.0).view(4, 2, 3)
    assert torch.equal(SyncBatchNorm(2)(x), nn.BatchNorm1d(2)(x))
    with pytest.raises(ValueError, match=r"\[N, C, ...\]"):
        SyncBatchNorm(2)(torch.ones(3))


def test_model_with_convolutions_under_ddp_trains_as_one_process():
    """Uneven batches, ranks weigh in with their share, so that DDP's mean is the whole's."""

    def work() -> float:
        from torch.nn.parallel import DistributedDataParallel

        from pycoll.torch.sync_batch_norm import SyncBatchNorm

        def make() -> nn.Module:
            torch.manual_seed(1)
            return nn.Sequential(
                nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
            ).double()

        sizes = [5, 1, 0]
        begin = sum(sizes[: dist.get_rank()])
        mine = slice(begin, begin + sizes[dist.get_rank()])
        alone, ours = make(), DistributedDataParallel(SyncBatchNorm.convert(make()))
        random = torch.Generator().manual_seed(5)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, ours)]
        for _ in range(4):
            x = torch.randn(6, 2, 5, 5, generator=random, dtype=torch.float64)
            y = torch.randn(6, 3, generator=random, dtype=torch.float64)
            (alone(x) - y).square().sum().backward()
            ((ours(x[mine]) - y[mine]).square().sum() * len(sizes)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        theirs = alone.state_dict()
        return max((t - theirs[k]).abs().max().item() for k, t in ours.module.state_dict().items())

    assert max(run_with_group(work, 3)) < 1e-8
