"""Stages that are modules, batches that do not fit, shapes that change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import batch, gpt, loss_sum, ranks
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline

pytestmark = [pytest.mark.ranks, pytest.mark.torch]


class Two(nn.Module):
    """Makes a state and an integer mask of it."""

    def forward(self, x):
        return x * 2.0, (x.detach() > 0).long()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x, mask):
        return self.linear(x) * mask, mask


class First(nn.Module):
    def forward(self, x, mask):
        return x.sum(-1) + 0.0 * mask.sum()


def test_module_stages_pass_several_tensors_and_only_the_first_rank_needs_inputs():
    x, y = torch.randn(5, 3, generator=torch.manual_seed(3)).double(), torch.zeros(5).double()
    loss = nn.MSELoss()

    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(3, 3).double(), Two()), Masked(), First()]

    def rank(comm):
        module = modules()[comm.rank]
        stages = pipeline.ModuleStages({comm.rank: module}, 3)
        runtime = pipeline.PipelineRuntime(stages, "gpipe", comm, loss_fn=loss)
        given = (x if comm.rank == 0 else None), (y if comm.rank == 2 else None)
        result = runtime.step(*given, microbatches=2, scale=1 / 5)
        result = runtime.evaluate(*given, microbatches=2)
        return result.loss, [p.grad for p in module.parameters()]

    reference = modules()
    state = reference[0](x)
    for module in reference[1:]:
        state = module(*state)
    expected = loss(state, y)
    expected.backward()
    outcomes = ranks(rank, 3)
    for (got, gradients), module in zip(outcomes, reference, strict=True):
        assert got == pytest.approx(float(expected.detach()), abs=1e-12)
        for gradient, parameter in zip(gradients, module.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, atol=1e-12, rtol=0)


def test_frozen_first_stage_gets_no_gradients_and_no_bytes():
    x, y = batch(4)

    def rank(comm):
        model = gpt(depth=2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("blocks.1", "norm", "head")))
        cut = pipeline.cut(model, "blocks", 2, [comm.rank])
        runtime = pipeline.PipelineRuntime(cut, "zb1p", comm, loss_fn=loss_sum)
        result = [runtime.step(x, y, microbatches=2) for _ in range(2)][-1]
        return result.sent_bytes, {name for name, p in model.named_parameters() if p.grad is None}

    (first, without), (last, rest) = ranks(rank, 2)
    assert first > 0 and last == 0
    assert not rest and all(name.startswith(("blocks.0", "embed", "position")) for name in without)


# Shapes that change behind the runtime's back.


class Growing(nn.Module):
    """Its output grows with every second call, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.weight * x.repeat(1, (self.calls + 1) // 2)


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(-1)


def growing_rank(comm, dynamic: bool):
    module = Growing() if comm.rank == 0 else Sum()
    runtime = pipeline.PipelineRuntime(
        pipeline.ModuleStages({comm.rank: module}, 2),
        "gpipe",
        comm,
        loss_fn=lambda out, y: (out.sum(), len(out)),
        dynamic_shapes=dynamic,
    )
    x = torch.ones(2, 3)
    return [runtime.step(x, x, microbatches=2).loss for _ in range(3)]


def test_hidden_shape_that_changes_is_refused_and_taken_where_announced():
    with pytest.raises(UsageError, match=r"stage 0 makes .*\(1, 6\).* give .*dynamic_shapes=True"):
        ranks(growing_rank, 2, False)
    assert ranks(growing_rank, 2, True) == [[3.0, 6.0, 9.0]] * 2


# What is refused.


def fails(fn: Callable, n: int = 2) -> list[str]:
    outcomes = ranks(fn, n, return_errors=True)
    assert all(isinstance(error, UsageError) for error in outcomes), outcomes
    return [str(error) for error in outcomes]


def runtime_of(comm, name="gpipe", **options):
    cut = pipeline.cut(gpt(depth=2), "blocks", 2, [comm.rank])
    return pipeline.PipelineRuntime(cut, name, comm, loss_fn=loss_sum, **options)


def test_ranks_with_other_batches_are_told_so_all_of_them():
    x, y = batch(4)
    longer, _ = batch(4, length=5)

    def counts(comm):
        runtime_of(comm).step(x, y, microbatches=2 + comm.rank)

    def shapes(comm):
        runtime_of(comm).step(longer if comm.rank else x, y, microbatches=2)

    def no_inputs(comm):
        runtime_of(comm).step(x if comm.rank else None, y, microbatches=2)

    def no_targets(comm):
        runtime_of(comm).step(x, None, microbatches=2)

    for fn, text in (
        (counts, "rank 1 has 3 microbatches, rank 0 has 2: give all ranks of a pipeline"),
        (shapes, "the inputs of rank 1 have other shapes than those of rank 0"),
        (no_inputs, "rank 0 has the first stage, but no inputs"),
        (no_targets, "rank 1 has the last stage, and targets for 0 microbatches, expected 2"),
    ):
        assert all(text in message for message in fails(fn))


def test_what_does_not_fit_together_is_named():
    def wrong_stage(comm):
        cut = pipeline.cut(gpt(depth=2), "blocks", 2, [1 - comm.rank])
        pipeline.PipelineRuntime(cut, "gpipe", comm, loss_fn=loss_sum)

    def no_update(comm):
        runtime_of(comm, "pipedream")

    def tied_async(comm):
        cut = pipeline.cut(gpt(depth=2, tied=True), "blocks", 2, [comm.rank])
        pipeline.PipelineRuntime(cut, "pipedream", comm, update=lambda *_: None)

    def three_stages(comm):
        cut = pipeline.cut(gpt(depth=3), "blocks", 3, [comm.rank])
        pipeline.PipelineRuntime(cut, "gpipe", comm)

    for fn, text in (
        (wrong_stage, "rank 0 holds stages [1], but schedule gpipe expects [0] there"),
        (no_update, "schedule pipedream updates within a step: give update="),
        (tied_async, "they share embed.weight: untie them"),
        (three_stages, "3 stages for 2 ranks: expected a multiple"),
    ):
        assert text in fails(fn)[0]


def test_empty_batch_does_nothing():
    x, y = batch(4)

    def rank(comm):
        result = runtime_of(comm).step([], [])
        other = runtime_of(comm).step(x[:0], y[:0], microbatches=3)
        return (result.loss_sum, result.count), (other.loss_sum, other.count)

    assert ranks(rank, 2) == [((0.0, 0.0), (0.0, 0.0))] * 2
