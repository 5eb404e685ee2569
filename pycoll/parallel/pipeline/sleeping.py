"""Stages that sleep: they show a schedule's true bubbles on any machine, since sleep needs no core.

They use the real runtime, autograd and transfers, but do no arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import pycoll
from pycoll.parallel.pipeline.runtime import PipelineRuntime
from pycoll.parallel.pipeline.schedules.actions import Costs, Schedule
from pycoll.parallel.pipeline.schedules.simulate_pipeline import Event, Simulation
from pycoll.parallel.pipeline.stages import ModuleStages

if TYPE_CHECKING:
    from pycoll.communicator import Communicator


class _Sleep(torch.autograd.Function):
    """Passes a tensor on after one delay, and its gradient after another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepingStage(torch.nn.Module):
    """A stage that sleeps in its forward, for its input's gradient and for its weight's."""

    times = (0.0, 0.0, 0.0)  # seconds of F, I and W

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s, input_s, weight_s = self.times
        return _Sleep.apply(x + _Sleep.apply(self.weight, 0.0, weight_s), forward_s, input_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a step with sleeping stages.

    Attributes:
        schedule: The schedule.
        played: Times in seconds from the ranks' clocks, in the form of a simulation.
        updates: For PipeDream: the most updates between a forward and its backward, by stage.
    """

    schedule: Schedule
    played: Simulation
    updates: dict[int, int]


def measure(
    schedules: Sequence[Schedule],
    costs: Costs | None = None,
    unit_s: float = 0.01,
    stage_scale: Sequence[float] | None = None,
) -> list[Measured]:
    """Runs a step of sleeping stages for each schedule, on ranks of this host.

    Args:
        schedules: Schedules with the same number of ranks.
        costs: Costs of one microbatch on one rank, in units. Default: 1 for F, I and W.
        unit_s: Seconds of a unit.
        stage_scale: Relative duration of each stage. Default: 1 for all.

    Returns:
        Measured times, bubble and memory of each schedule.

    Cost: the duration of the schedules, and about 0.1 s per rank.
    """
    warm_up()
    scale = stage_scale or [1.0] * schedules[0].num_stages
    outcomes = pycoll.run_ranks(
        _rank, schedules[0].num_ranks, schedules, costs or Costs(), unit_s, scale
    )
    by_schedule = zip(schedules, zip(*outcomes, strict=True), strict=True)
    return [_measured(schedule, list(of)) for schedule, of in by_schedule]


def warm_up() -> None:
    """Makes torch import what its first backward needs, so that forked ranks inherit it."""
    x = torch.ones(1, requires_grad=True)
    torch.autograd.backward([x * 2], [torch.ones(1)])


def _rank(
    comm: Communicator,
    schedules: Sequence[Schedule],
    costs: Costs,
    unit_s: float,
    scale: Sequence[float],
) -> list[Any]:
    return [_step(comm, schedule, costs, unit_s, scale) for schedule in schedules]


def _step(
    comm: Communicator, schedule: Schedule, costs: Costs, unit_s: float, scale: Sequence[float]
) -> Any:
    part = unit_s / schedule.stages_per_rank
    length = costs.forward * part, costs.backward_input * part, costs.backward_weight * part
    local = schedule.stages_of(comm.rank)
    stages = ModuleStages({stage: SleepingStage() for stage in local}, schedule.num_stages)
    runtime = PipelineRuntime(stages, schedule, comm, update=lambda *_: None)
    x = [torch.ones(1)] * schedule.num_microbatches

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.sum(), 1

    runtime.step(x, x, loss_fn=loss_fn)  # warm-up without sleep: announces shapes
    for stage, module in zip(local, stages.modules(), strict=True):
        module.times = tuple(seconds * scale[stage] for seconds in length)
    comm.barrier()
    result = runtime.step(x, x, loss_fn=loss_fn)
    moments = [(m.action, m.start_ns, m.end_ns) for m in result.moments if not m.waited]
    return moments, result.peak_live, result.staleness


def _measured(schedule: Schedule, outcomes: list[Any]) -> Measured:
    begin = min(moments[0][1] for moments, _, _ in outcomes)
    events = tuple(
        Event(rank, action, (start - begin) / 1e9, (end - begin) / 1e9)
        for rank, (moments, _, _) in enumerate(outcomes)
        for action, start, end in moments
    )
    busy = tuple(
        sum(event.end - event.start for event in events if event.rank == rank)
        for rank in range(schedule.num_ranks)
    )
    played = Simulation(
        events, max(e.end for e in events), busy, tuple(peak for _, peak, _ in outcomes)
    )
    updates: dict[int, int] = {}
    for _, _, staleness in outcomes:
        for (stage, _), stale in staleness.items():
            updates[stage] = max(updates.get(stage, 0), stale)
    return Measured(schedule, played, updates)


__all__ = ["Measured", "SleepingStage", "measure"]
