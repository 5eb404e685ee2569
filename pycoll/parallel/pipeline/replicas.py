"""Replicas of a stage: the mean of their gradients, before each of their common updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Schedule
from pycoll.parallel.pipeline.stages import Stages

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

Update = Callable[[int, int], None]


def replicas_of(schedule: str | Schedule, replicas: Sequence[int]) -> tuple[int, ...]:
    """The number of ranks of each stage; empty: each stage has one.

    Raises:
        UsageError: The schedule has no replicas.
    """
    if isinstance(schedule, Schedule):
        return schedule.replicas
    if replicas and schedule != "pipedream":
        raise UsageError(
            f"schedule {schedule!r}: only 'pipedream' runs stages with replicas: take it, or the "
            "axis dp of a mesh"
        )
    return tuple(replicas)


class MeanOverReplicas:
    """Averages the gradients of this rank's stage over its replicas."""

    def __init__(self, replicas: tuple[int, ...], comm: Communicator, stages: Stages) -> None:
        """Takes the number of consecutive ranks of each stage; empty: no stage has replicas."""
        self._stages, self._comm = stages, comm
        self._ends = list(accumulate(replicas))
        self._group: Communicator | None = None

    def connect(self) -> None:
        """Makes the communicator of each stage at the first call. Collective.

        Cost: a split.
        """
        if self._ends and self._group is None:
            stage = next(i for i, end in enumerate(self._ends) if self._comm.rank < end)
            self._group = self._comm.split(stage)

    def before(self, update: Update) -> Update:
        """An update that averages first."""

        def averaged(stage: int, microbatch: int) -> None:
            self._average(stage)
            update(stage, microbatch)

        return averaged

    def _average(self, stage: int) -> None:
        """Sets `.grad` of a stage to the mean over its replicas.

        Cost: one all_reduce of the stage's gradients.
        """
        learning = [p for p in self._stages.parameters_of(stage).values() if p.requires_grad]
        if self._group is None or self._group.size == 1 or not learning:
            return
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in learning]
        flat = torch.cat([gradient.flatten() for gradient in found])
        self._group.all_reduce(flat)
        parts = (flat / self._group.size).split([p.numel() for p in learning])
        for parameter, part in zip(learning, parts, strict=True):
            parameter.grad = part.view_as(parameter)


__all__ = ["MeanOverReplicas", "replicas_of"]
