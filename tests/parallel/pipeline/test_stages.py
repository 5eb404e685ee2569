"""Stages that are modules, batches that do not fit, shapes that change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import batch, gpt, loss_sum, ranks
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline


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
    assert not rest and all(name.startswith(("blocks.0", "token", "place")) for name in without)


# Shapes that change while those of the inputs do not.


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


# Refusals.


def assert_refused(mistakes: dict[str, Callable], on_all_ranks: bool) -> None:
    for text, mistake in mistakes.items():
        errors = ranks(mistake, 2, return_errors=True)
        assert all(isinstance(error, UsageError) for error in errors), errors
        assert all(text in str(error) for error in errors[: 2 if on_all_ranks else 1]), text


def runtime_of(comm, name="gpipe", stage=None, depth=2, tied=False, **options):
    stage = comm.rank if stage is None else stage
    cut = pipeline.cut(gpt(depth=depth, tied=tied), "blocks", depth, [stage])
    return pipeline.PipelineRuntime(cut, name, comm, loss_fn=loss_sum, **options)


def test_batches_that_differ_are_refused_on_all_ranks():
    x, y = batch(4)
    longer, _ = batch(4, length=5)

    def step(inputs: Callable, targets=y, more: int = 0) -> Callable:
        """Steps with inputs, and more microbatches, that depend on the rank."""
        return lambda comm: runtime_of(comm).step(
            inputs(comm.rank), targets, microbatches=2 + more * comm.rank
        )

    assert_refused(
        {
            "rank 1 has 3 microbatches, rank 0 has 2: give all ranks of a pipeline": (
                step(lambda rank: x, more=1)
            ),
            "the inputs of rank 1 have other shapes than those of rank 0": (
                step(lambda rank: longer if rank else x)
            ),
            "rank 0 has the first stage, but no inputs": step(lambda rank: x if rank else None),
            "rank 1 has the last stage, and targets for 0 microbatches, expected 2": (
                step(lambda rank: x, targets=None)
            ),
        },
        on_all_ranks=True,
    )


def test_what_does_not_fit_together_is_named():
    assert_refused(
        {
            "rank 0 holds stages [1], but schedule gpipe expects [0] there": (
                lambda comm: runtime_of(comm, stage=1 - comm.rank)
            ),
            "schedule pipedream updates within a step: give update=": (
                lambda comm: runtime_of(comm, "pipedream")
            ),
            "they share token.weight: untie them": (
                lambda comm: runtime_of(comm, "pipedream", tied=True, update=lambda *_: None)
            ),
            "3 stages for 2 ranks: expected a multiple": lambda comm: runtime_of(comm, depth=3),
        },
        on_all_ranks=False,
    )


def test_empty_batch_does_nothing():
    x, y = batch(4)

    def rank(comm):
        result = runtime_of(comm).step([], [])
        other = runtime_of(comm).step(x[:0], y[:0], microbatches=3)
        return (result.loss_sum, result.count), (other.loss_sum, other.count)

    assert ranks(rank, 2) == [((0.0, 0.0), (0.0, 0.0))] * 2
