"""DistributedDataParallel in its variants gives the gradients of one process."""

from __future__ import annotations

import copy
import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from group_ranks import BACKEND, run_with_group  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

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
    """Of all ranks: shape [n, 6, 20]."""
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


@pytest.mark.parametrize("n", [2, 3])
def test_ddp_steps_as_one_process(n):
    def work() -> list[float]:
        return [
            train_beside_one_process({}),
            train_beside_one_process({"gradient_as_bucket_view": True}),
            train_beside_one_process({"static_graph": True}),
            train_beside_one_process({"find_unused_parameters": True}, use_all=False),
            train_beside_one_process({"broadcast_buffers": False}),
            train_beside_one_process({}, dtype=torch.float32) / 1e8,
        ]

    for off in run_with_group(work, n):
        assert max(off) < 1e-12, off


@pytest.mark.parametrize("n", [2, 3])
def test_torch_s_own_hooks_average(n):
    def work() -> list[float]:
        def plain(hook):
            return lambda ddp: ddp.register_comm_hook(None, hook)

        return [
            train_beside_one_process({}, plain(default_hooks.allreduce_hook)),
            train_beside_one_process({}, plain(default_hooks.fp16_compress_hook)) / 1e9,
        ]

    for off in run_with_group(work, n):
        assert max(off) < 1e-11, off


@pytest.mark.skipif(BACKEND == "gloo", reason="both of Gloo's threads wait within callbacks")
@pytest.mark.parametrize("n", [2, 3])
def test_callback_may_wait_for_a_further_operation(n):
    """As PowerSGD's does, for several buckets at once."""

    def work() -> list[float]:
        def power_sgd(ddp):
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=60, start_powerSGD_iter=2, min_compression_rate=0
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def a_chain(ddp):
            """Waits within a callback for a further operation, as PowerSGD does."""

            def hook(group, bucket):
                first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

                def again(done):
                    total = done.value()[0].clone()
                    dist.all_reduce(total, async_op=True).get_future().wait()
                    return total / dist.get_world_size() ** 2

                return first.then(again)

            ddp.register_comm_hook(None, hook)

        return [
            train_beside_one_process({}, a_chain),
            train_beside_one_process({}, power_sgd, torch.float32) / 1e7,
        ]

    for off in run_with_group(work, n):
        assert max(off) < 1e-11, off


def test_no_sync_accumulates_and_join_lets_a_rank_end_early():
    def work() -> tuple[float, int]:
        n, rank = dist.get_world_size(), dist.get_rank()
        alone = Model()
        ours = DistributedDataParallel(copy.deepcopy(alone))
        with ours.no_sync():
            ours(batch(0, n)[rank]).square().mean().backward()
        ours(batch(1, n)[rank]).square().mean().backward()
        for step in range(2):
            alone(batch(step, n).flatten(0, 1)).square().mean().backward()
        pairs = zip(ours.parameters(), alone.parameters(), strict=True)
        off = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
        steps = 0
        with ours.join():
            for _ in range(2 + 3 * rank):
                ours(batch(2, n)[rank]).sum().backward()
                steps += 1
        return off, steps

    for rank, (off, steps) in enumerate(run_with_group(work, 3)):
        assert off < 1e-12
        assert steps == 2 + 3 * rank


def test_zero_redundancy_optimizer_shards_the_state():
    def work() -> float:
        n, rank = dist.get_world_size(), dist.get_rank()
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
        return largest_difference(ours.module, alone)

    assert max(run_with_group(work, 2)) < 1e-12


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_debug_level_changes_nothing(level, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)

    def work() -> float:
        assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == level
        group = dist.new_group()
        x = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1.0] * 3
        return train_beside_one_process({"process_group": group})

    assert max(run_with_group(work, 2)) < 1e-12


def test_debug_level_detail_names_a_shape_that_differs(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def work() -> str:
        group = dist.new_group()
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
        return str(error.value)

    for text in run_with_group(work, 2):
        assert "3" in text and "4" in text
        assert "ALLREDUCE" in text or "all_reduce" in text
