"""DistributedDataParallel in its variants gives the gradients of one process."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import beyond_gloo, finish, init, on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


class Model(nn.Module):
    """Several buckets at the caps used here, a shared layer, one that is not always used."""

    def __init__(self, dtype=torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(20, 60), nn.Linear(60, 60)
        self.sometimes, self.last = nn.Linear(60, 60), nn.Linear(60, 5)
        self.register_buffer("seen", torch.zeros(1))
        self.to(dtype)

    def forward(self, x, use_all=True):
        self.seen += 1
        x = torch.relu(self.twice(torch.relu(self.twice(torch.relu(self.first(x))))))
        return self.last(torch.relu(self.sometimes(x)) if use_all else x)


def batch(step: int, n: int, dtype=torch.float64) -> torch.Tensor:
    """Inputs of all ranks, shape [n, 6, 20]."""
    return torch.randn(n, 6, 20, generator=torch.Generator().manual_seed(step)).to(dtype)


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def train_beside_one_process(options: dict, hook=None, dtype=torch.float64, use_all=True) -> float:
    """How far the weights are off after three steps."""
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = Model(dtype)
    ours = DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.01, **options)
    if hook is not None:
        hook(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, alone)]
    for step in range(3):
        x = batch(step, n, dtype)
        ours(x[rank], use_all).square().mean().backward()
        alone(x.flatten(0, 1), use_all).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return largest_difference(ours.module, alone)


@on_ranks(2, 3)
def test_ddp_steps_as_one_process(rank, n):
    off = {
        "plain": train_beside_one_process({}),
        "bucket view": train_beside_one_process({"gradient_as_bucket_view": True}),
        "static graph": train_beside_one_process({"static_graph": True}),
        "unused": train_beside_one_process({"find_unused_parameters": True}, use_all=False),
        "buffers": train_beside_one_process({"broadcast_buffers": False}),
        "float32": train_beside_one_process({}, dtype=torch.float32) / 1e8,
    }
    for hook, scale in ((default_hooks.allreduce_hook, 1), (default_hooks.fp16_compress_hook, 1e9)):
        register = functools.partial(
            DistributedDataParallel.register_comm_hook, state=None, hook=hook
        )
        off[hook.__name__] = train_beside_one_process({}, register) / scale / 10
    assert max(off.values()) < 1e-12, off


@beyond_gloo("both of Gloo's threads wait within callbacks")
@on_ranks(2, 3)
def test_callback_may_wait_for_a_further_operation(rank, n):
    """As PowerSGD's does, for several buckets at once."""

    def power_sgd(ddp):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=60, start_powerSGD_iter=2, min_compression_rate=0
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def a_chain(ddp):
        def hook(group, bucket):
            first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

            def again(done):
                total = done.value()[0].clone()
                dist.all_reduce(total, async_op=True).get_future().wait()
                return total / n**2

            return first.then(again)

        ddp.register_comm_hook(None, hook)

    assert train_beside_one_process({}, a_chain) < 1e-11
    assert train_beside_one_process({}, power_sgd, torch.float32) < 1e-4


@on_ranks(3)
def test_no_sync_accumulates_and_join_lets_a_rank_end_early(rank, n):
    alone = Model()
    ours = DistributedDataParallel(copy.deepcopy(alone))
    with ours.no_sync():
        ours(batch(0, n)[rank]).square().mean().backward()
    ours(batch(1, n)[rank]).square().mean().backward()
    for step in range(2):
        alone(batch(step, n).flatten(0, 1)).square().mean().backward()
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    assert max((a.grad - b.grad).abs().max().item() for a, b in pairs) < 1e-12
    with ours.join():
        for _ in range(2 + 3 * rank):
            ours(batch(2, n)[rank]).sum().backward()


@on_ranks(2)
def test_zero_redundancy_optimizer_shards_the_state(rank, n):
    alone = Model()
    ours = DistributedDataParallel(copy.deepcopy(alone))
    sharded = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.01)
    whole = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(3):
        ours(batch(step, n)[rank]).square().mean().backward()
        alone(batch(step, n).flatten(0, 1)).square().mean().backward()
        for optimizer in (sharded, whole):
            optimizer.step()
            optimizer.zero_grad()
    sharded.consolidate_state_dict(to=0)
    assert largest_difference(ours.module, alone) < 1e-12


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
@on_ranks(2, group=False)
def test_debug_level_changes_nothing_but_detail_names_a_shape_that_differs(
    rank, n, level, tmp_path
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
        dist.set_debug_level_from_env()
    init(rank, n, tmp_path / "store")
    group = dist.new_group()
    for is_async in (False, True):
        x = torch.full((3,), float(rank))
        finish(dist.all_reduce(x, group=group, async_op=is_async))
        assert x.tolist() == [1.0] * 3
    outs = [torch.zeros(3) for _ in range(n)]
    dist.all_gather(outs, torch.full((3,), float(rank)))
    assert [out[0] for out in outs] == [0, 1]
    dist.barrier()
    assert train_beside_one_process({"process_group": group}) < 1e-12
    if level == "DETAIL":
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(3 + rank), group=group)
        assert "3" in str(error.value) and "4" in str(error.value)
        assert "ALLREDUCE" in str(error.value) or "all_reduce" in str(error.value)
    dist.destroy_process_group()
