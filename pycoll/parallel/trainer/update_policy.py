"""Schedules without a flush: the optimizer steps after each microbatch, within `model.step`."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import Loss
from pycoll.parallel.data.reducer import Reducer
from pycoll.parallel.tools.check_hooks import FOLDER

_FLUSH = "or take a schedule with a flush, such as 1f1b"


class Updates:
    """The optimizer's steps of this rank's stage, one for each microbatch.

    A gradient is that of the mean over one microbatch of all replicas, the i-th parts of their
    shares. Stages step at different times, so an update must not wait for another stage.

    Attributes:
        optimizer: The torch optimizer; None until `pc.optimizer` has made one.
    """

    def __init__(
        self, schedule: str, group: AxisGroup, data_ranks: AxisGroup, reducer: Reducer
    ) -> None:
        self.schedule = schedule
        self.optimizer: torch.optim.Optimizer | None = None
        self._group, self._data_ranks, self._reducer = group, data_ranks, reducer
        self._left = 0

    def take(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        """Sets the optimizer that steps the stage.

        Raises:
            UsageError: `clip` is set.
        """
        if clip is not None:
            self.refuse_sums("clip")
        self.optimizer = optimizer

    def refuse_sums(self, what: str) -> NoReturn:
        """Refuses what needs sums over all ranks."""
        raise UsageError(
            f"optimizer: {what} needs sums over all stages at once, and schedule "
            f"{self.schedule!r} steps each stage at its own time: leave {what} out, {_FLUSH}"
        )

    def begin(self, mine: int, *, syncing: bool) -> int:
        """Prepares a batch.

        Args:
            mine: Number of this replica's microbatches.
            syncing: False within `no_sync`.

        Returns:
            The number of updates: the most microbatches that any replica has.

        Raises:
            UsageError: There is no optimizer, or `syncing` is false.
        """
        if not syncing:
            raise UsageError(
                f"no_sync adds gradients up over steps, and schedule {self.schedule!r} steps the "
                f"optimizer at every microbatch: give model.step more at once, {_FLUSH}"
            )
        if self.optimizer is None:
            raise UsageError(
                f"schedule {self.schedule!r} steps the optimizer within model.step: make it before,"
                " by pc.optimizer(...)"
            )
        most = torch.tensor([mine])
        if self._group.size > 1:
            self._group.all_reduce(most, "max")
        self._left = int(most)
        if self._left > 1 and FOLDER in os.environ:
            raise UsageError(
                f"check: schedule {self.schedule!r} trains with weights that are some updates old, "
                f"so no mesh equals one process: give model.step microbatches=1, {_FLUSH}"
            )
        return self._left

    def of_means(self, loss: Loss) -> Loss:
        """Returns a loss whose gradient is that of the mean over the microbatch of all replicas."""

        def mean(output: Any, target: Any) -> tuple[Tensor, int]:
            total, count = loss(output, target)
            counted = torch.tensor([count])
            if self._group.size > 1:
                self._group.all_reduce(counted)
            if total.requires_grad:
                total.register_hook(lambda gradient: gradient / max(int(counted), 1))
            return total, count

        return mean

    def reduce(self, names: set[str]) -> None:
        """Adds up the replicas' gradients that a stage's backward left in `.grad`."""
        self._reducer.begin(reduce=True, staged=True)
        self._reducer.complete(names)
        self._reducer.finish()

    def step(self) -> None:
        """Steps the stage by its reduced gradients; the last gradients stay readable."""
        assert self.optimizer is not None
        presence = self._reducer.presence()
        if self._data_ranks.size > 1 and len(presence):
            self._data_ranks.all_reduce(presence)
        self._reducer.settle(presence, 1.0)
        self.optimizer.step()
        self._reducer.publish()
        self._left -= 1
        if self._left:
            self._reducer.clear()


def refuse(schedule: str, *, zero: int, recompute: str | bool | None) -> None:
    """Refuses options that a schedule with updates within a step does not support.

    Raises:
        UsageError: Such an option is set.
    """
    if zero == 3:
        raise UsageError(
            f"parallelize: schedule {schedule!r} keeps whole versions of a stage's weights, which "
            f"zero=3 would share out: take zero=2 or less, {_FLUSH}"
        )
    if recompute:
        raise UsageError(
            f"parallelize: recompute would use weights that schedule {schedule!r} has updated "
            f"since the forward: leave recompute out, {_FLUSH}"
        )


__all__ = ["Updates", "refuse"]
