"""The runtime, which runs any schedule over a communicator, step by step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.errors import UsageError
from pycoll.parallel.core.devices import CPU, Clock, HostClock
from pycoll.parallel.core.losses import numbers
from pycoll.parallel.core.transfers import Transfers
from pycoll.parallel.pipeline import trace_events
from pycoll.parallel.pipeline.agree import agree
from pycoll.parallel.pipeline.messages import Messages, links_of
from pycoll.parallel.pipeline.microbatches import as_call, split_batch
from pycoll.parallel.pipeline.replicas import MeanOverReplicas, replicas_of
from pycoll.parallel.pipeline.result import StepResult
from pycoll.parallel.pipeline.schedules.actions import Kind, Schedule
from pycoll.parallel.pipeline.schedules.pipedream import round_robin
from pycoll.parallel.pipeline.schedules.registry import build
from pycoll.parallel.pipeline.schedules.transfers import (
    PREFETCH,
    check_link_order,
    with_transfers,
)
from pycoll.parallel.pipeline.schedules.validate import validate
from pycoll.parallel.pipeline.shared import set_aside, sum_shared_gradients
from pycoll.parallel.pipeline.stages import Stages
from pycoll.parallel.pipeline.stash import Stash
from pycoll.parallel.pipeline.step import Arrivals, Hooks, Moment, StepRun

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_KNOWN = 64  # sets of shapes that are remembered


class PipelineRuntime:
    """Runs a model's stages on the ranks of a communicator, by a schedule."""

    def __init__(
        self,
        stages: Stages,
        schedule: str | Schedule,
        comm: Communicator,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        on_microbatch: Callable[[int], None] | None = None,
        on_last_backward: Callable[[int], None] | None = None,
        on_weight_grad_ready: Callable[[int], None] | None = None,
        update: Callable[[int, int], None] | None = None,
        replicas: Sequence[int] = (),
        split_backward: bool = True,
        dynamic_shapes: bool = False,
        prefetch: int = PREFETCH,
        record_steps: int = 16,
        transfers: Transfers | None = None,
        device: str = CPU,
        clock: Clock | None = None,
    ) -> None:
        """Combines stages, schedule and ranks. Not collective.

        Args:
            stages: The model, from `cut` or as `ModuleStages`.
            schedule: A schedule name, for any number of microbatches; or a custom schedule.
            comm: Communicator whose ranks run the schedule.
            loss_fn: Called with the model's output and a microbatch's targets, on the last stage.
                Returns the sum of losses and the count, or one mean over the targets.
            on_microbatch: Called with a microbatch's number before each compute action on it.
            on_last_backward: Called with a stage before the step's last action that computes
                gradients of its weights.
            on_weight_grad_ready: Called with a stage when these gradients are complete; those
                of parameters that stages share are complete only after the step.
            update: Called with stage and the update's last microbatch, by schedules that update
                within a step; updates the stage's weights from `.grad`, the sum over the update's
                microbatches (`Schedule.round_of`), and clears it.
            replicas: Number of ranks of each stage, such as (3, 1), for the schedule "pipedream":
                consecutive ranks hold the same weights of a stage and take turns at its
                microbatches. `.grad` is the mean over their turn when `update` is called.
            split_backward: If false, I runs the whole backward and W does nothing: for models with
                activation recomputation, which each W would repeat.
            dynamic_shapes: Whether shapes may change while those of the inputs do not: every
                message is announced.
            prefetch: Number of actions by which receives are posted ahead.
            record_steps: Number of latest steps that `write_timeline` writes.
            transfers: Moves tensors between the ranks of `comm`; None: the runtime makes its own.
            device: The device of this rank's tensors.
            clock: Measures the actions; None: by the calling thread.

        Raises:
            UsageError: Stages, schedule and ranks do not fit, or the schedule is invalid.
        """
        self.stages = stages
        self._schedule = schedule
        self._comm = comm
        self._transfers = transfers or Transfers(comm)
        self._device, self._clock = device, clock or HostClock()
        self._loss = loss_fn
        self._replicas = replicas_of(schedule, replicas)
        self._mean = MeanOverReplicas(self._replicas, comm, stages)
        self._hooks = Hooks(
            None,
            on_microbatch,
            on_last_backward,
            on_weight_grad_ready,
            update if update is None else self._mean.before(update),
            split_backward,
        )
        self._dynamic = dynamic_shapes
        self._prefetch = prefetch
        self._programs: dict[int, tuple[Schedule, Schedule]] = {}
        self._known: dict[tuple[int, bool], Arrivals] = {}
        self.bubble_s = 0.0  # idle time of this rank in the last step
        self._recorded: deque[list[Moment]] = deque(maxlen=record_steps)
        self._fit(self.schedule_of(self._num_own_microbatches()))

    def schedule_of(self, num_microbatches: int) -> Schedule:
        """The schedule of a step: validated, and without transfers.

        Raises:
            UsageError: A custom schedule has another number of microbatches.
        """
        return self._program(num_microbatches)[0]

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        microbatches: int | None = None,
        scale: float = 1.0,
    ) -> StepResult:
        """Forward and backward of a batch. Collective over the pipeline's ranks.

        Adds to `.grad` the gradients of the sum of the losses, times `scale`.

        Args:
            inputs: The model's batch: a tensor, a tuple of arguments, a dict of keyword
                arguments, or a list of microbatches. The same on all ranks; with ModuleStages,
                only the rank of the first stage needs it.
            targets: Targets of the loss, split like the inputs; the last stage's rank needs them.
            loss_fn: Loss function instead of the runtime's.
            microbatches: Number of microbatches. It may be below the number of stages, and the
                batch need not divide.
            scale: Factor of the loss, for the gradients only.

        Returns:
            The loss, and measurements of the step.

        Raises:
            UsageError: The ranks' numbers of microbatches differ, or an argument is missing.
            Error: A transfer failed.
        """
        loss = loss_fn or self._loss
        if loss is None:
            raise UsageError("step needs a loss_fn: pass it here or to PipelineRuntime")
        return self._run(inputs, targets, loss, microbatches, scale, train=True)

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        microbatches: int | None = None,
    ) -> StepResult:
        """Runs forward only, like `step`. Without targets, the last stage's rank gets outputs."""
        loss = (loss_fn or self._loss) if targets is not None else None
        return self._run(inputs, targets, loss, microbatches, 1.0, train=False)

    def write_timeline(self, folder: str | Path, also: Sequence[Communicator] = ()) -> list[Path]:
        """Writes the last steps of this rank, for `pycoll trace FOLDER -o trace.json`.

        Args:
            folder: Output folder; it also gets the flight record of the pipeline's communicator.
            also: Other communicators whose flight records are written too.

        Returns:
            The files.
        """
        made = next(iter(self._programs.values()))[0]
        return trace_events.write(self._recorded, made.name, self._comm, folder, also)

    # One step.

    def _run(
        self,
        inputs: Any,
        targets: Any,
        loss: Any,
        microbatches: int | None,
        scale: float,
        train: bool,
    ) -> StepResult:
        calls = split_batch(inputs, microbatches)
        wanted = split_batch(targets, microbatches)
        num, shapes = agree(self._comm, self._placement(), calls, wanted, loss is not None)
        if num == 0:
            return StepResult(0.0, 0.0, {}, [], 0, 0, {})
        schedule, program = self._program(num)
        self._mean.connect()
        if not train:
            backward = (Kind.B, Kind.I, Kind.W, Kind.U)
            schedule = schedule.without(*backward)
            program = with_transfers(schedule, self._prefetch)
        key = shapes, train  # evaluation wants no gradients
        announced = self._dynamic or key not in self._known
        arrivals = {} if announced else self._known[key]
        stashes = {}
        if schedule.updates:
            stashes = {
                stage: Stash(self.stages.parameters_of(stage), schedule.versions)
                for stage in self.stages.local_stages
            }
        run = StepRun(
            self.stages,
            schedule,
            Messages(self._transfers, schedule),
            [as_call(call) for call in calls or ()],
            wanted,
            replace(self._hooks, loss=loss),
            arrivals,
            announced,
            train,
            scale,
            stashes,
            self._clock,
        )
        self._transfers.connect(links_of(schedule), self._device)
        begin = time.perf_counter()
        before = set_aside(self.stages, schedule.placement, self._transfers) if train else {}
        run.run(program.orders[self._comm.rank])
        if announced and not self._dynamic:
            self._remember(key, run.arrivals)
        if train:
            sum_shared_gradients(self.stages, schedule.placement, self._transfers, before)
        of_losses = zip(*(run.losses[i] for i in sorted(run.losses)), strict=True)
        totals = np.array([sum(numbers(of)) for of in of_losses] or [0, 0], np.float64)
        if schedule.replicas:
            self._comm.all_reduce(totals)  # the replicas of the last stage have a share each
        else:
            self._comm.broadcast(totals, root=schedule.placement[-1])
        run.read_clock()
        self._recorded.append(run.moments)
        result = StepResult(
            float(totals[0]),
            float(totals[1]),
            run.outputs,
            run.moments,
            run.peak_live,
            run.messages.sent_bytes,
            run.staleness,
        )
        self.bubble_s = time.perf_counter() - begin - result.busy_s
        return result

    def _remember(self, key: tuple[int, bool], arrivals: Arrivals) -> None:
        while len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]  # the oldest: the same on all ranks
        self._known[key] = arrivals

    # The schedule.

    def _num_own_microbatches(self) -> int:
        own = self._schedule
        if isinstance(own, Schedule):
            return own.num_microbatches
        return math.lcm(*self._replicas) if self._replicas else self._comm.size

    def _placement(self) -> tuple[int, ...]:
        return self.schedule_of(self._num_own_microbatches()).placement

    def _program(self, num: int) -> tuple[Schedule, Schedule]:
        if num not in self._programs:
            own, size = self._schedule, self._comm.size
            if isinstance(own, Schedule):
                if own.num_microbatches != num:
                    raise UsageError(
                        f"schedule {own.name} has {own.num_microbatches} microbatches, got {num}"
                    )
                validate(own)
                made = own
            elif self._replicas:
                made = round_robin(self._replicas, num)
                validate(made)
            else:
                per_rank, rest = divmod(self.stages.num_stages, size)
                if rest or not per_rank:
                    raise UsageError(
                        f"{self.stages.num_stages} stages for {size} ranks: expected a multiple"
                    )
                made = build(own, size, num, per_rank)
            program = with_transfers(made, self._prefetch)
            if self._device != CPU:
                check_link_order(program)
            self._programs[num] = made, program
        return self._programs[num]

    def _fit(self, schedule: Schedule) -> None:
        comm = self._comm
        if schedule.num_ranks != comm.size or schedule.num_stages != self.stages.num_stages:
            raise UsageError(
                f"schedule {schedule.name} has {schedule.num_ranks} ranks and "
                f"{schedule.num_stages} stages; there are {comm.size} and {self.stages.num_stages}"
            )
        if schedule.stages_of(comm.rank) != self.stages.local_stages:
            raise UsageError(
                f"rank {comm.rank} holds stages {list(self.stages.local_stages)}, but schedule "
                f"{schedule.name} expects {list(schedule.stages_of(comm.rank))} there"
            )
        if schedule.updates and self._hooks.update is None:
            raise UsageError(f"schedule {schedule.name} updates within a step: give update=")
        if schedule.updates and self.stages.shared:
            raise UsageError(
                f"schedule {schedule.name} updates stages at different times, and they share "
                f"{', '.join(self.stages.shared)}: untie them or take a schedule with a flush"
            )


__all__ = ["PipelineRuntime", "StepResult"]
