"""SyncBatchNorm on n ranks is BatchNorm of one process over all batches, gradients too."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import on_ranks

from pycoll.torch.sync_batch_norm import SyncBatchNorm

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

CHANNELS = 5
# Batches of each rank, by the number of ranks: even, uneven, some empty.
BATCHES = {2: [(4, 4), (1, 6), (0, 5)], 3: [(3, 0, 2)], 4: [(1, 1, 0, 7)]}
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


def check(rank: int, batches: tuple[int, ...], case: tuple) -> None:
    """Two steps of all batches, compared with the layer of one process in float64."""
    shape, dtype, affine, (tracked, momentum) = case
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
        if tensor.numel():
            scale = max(1.0, expected[name].abs().max().item())
            off = (tensor - expected[name]).abs().max().item() / scale
            assert off <= TOLERANCE[dtype], (name, off, batches, case)
    # Evaluating: running statistics where there are some, else those of the own batch.
    alone.eval()
    ours.eval()
    if tracked and batches[rank]:  # here no rank waits for another
        off = (ours(x[mine]).double() - alone(x[mine].to(wide))).abs().max()
        assert off <= 10 * TOLERANCE[dtype], (off, batches, case)


@on_ranks(*BATCHES)
def test_batches_of_all_ranks_give_the_result_of_one_process(rank, n):
    """All shapes with all dtypes for all batches; the six kinds of layer in turn."""
    kinds = [*itertools.product((True, False), [(True, 0.1), (True, None), (False, 0.1)])]
    for batches in BATCHES[n]:
        for i, (shape, dtype) in enumerate(itertools.product(SHAPES, TOLERANCE)):
            for affine, statistics in (kinds[(i + sum(batches)) % 6], kinds[(2 * i) % 6]):
                check(rank, batches, (shape, dtype, affine, statistics))


@on_ranks(2)
def test_one_value_per_channel_raises_on_every_rank(rank, n):
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        SyncBatchNorm(CHANNELS)(torch.ones(int(rank == 1), CHANNELS))
    assert f"({rank}, 5) on this rank" in str(error.value)


@on_ranks(2)
def test_all_batches_empty_gives_an_empty_result_and_keeps_statistics(rank, n):
    layer = SyncBatchNorm(CHANNELS)
    x = torch.empty(0, CHANNELS, 3, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    assert output.shape == (0, CHANNELS, 3)
    assert layer.running_var.sum().item() == CHANNELS


def test_convert_takes_over_parameters_buffers_and_mode():
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
    x = torch.arange(24.0).view(4, 2, 3)
    assert torch.equal(SyncBatchNorm(2)(x), nn.BatchNorm1d(2)(x))
    with pytest.raises(ValueError, match=r"\[N, C, ...\]"):
        SyncBatchNorm(2)(torch.ones(3))


def make_network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers).double()


@on_ranks(3)
def test_model_with_convolutions_under_ddp_trains_as_one_process(rank, n):
    """Uneven batches, ranks weigh in with their share, so that DDP's mean is the whole's."""
    sizes = [5, 1, 0]
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    alone, ours = make_network(), DistributedDataParallel(SyncBatchNorm.convert(make_network()))
    random = torch.Generator().manual_seed(5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, ours)]
    for _ in range(4):
        x = torch.randn(6, 2, 5, 5, generator=random, dtype=torch.float64)
        y = torch.randn(6, 3, generator=random, dtype=torch.float64)
        (alone(x) - y).square().sum().backward()
        ((ours(x[mine]) - y[mine]).square().sum() * n).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = alone.state_dict()
    for name, tensor in ours.module.state_dict().items():
        assert (tensor - theirs[name]).abs().max() < 1e-8, name
