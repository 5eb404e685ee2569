"""When the optimizer steps, and by which gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.core.lateness import Late
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import Loss
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.features.pipeline import FLUSH


class UpdatePolicy:
    """Synchronous updates: one for each step, by the gradient of the mean over all replicas.

    Other policies override what differs.

    Attributes:
        steps_within: The optimizer steps within `model.step`.
        num_updates: Number of such steps for the last batch.
        steps_alone: A rank with whole parameters waits for no other rank in `step`.
        reducer: The gradients.
    """

    steps_within, steps_alone = False, True
    num_updates = 0

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def take(self, optimizer: torch.optim.Optimizer, clip: float | None) -> torch.optim.Optimizer:
        """Hears of the optimizer that is to step this rank's pieces.

        Returns:
            The optimizer that steps them.

        Raises:
            UsageError: The policy does not allow it.
        """
        return optimizer

    def refuse_sums(self, what: str) -> None:
        """Raises UsageError if the optimizer cannot have `what`, a sum over all ranks."""

    def check_called_alone(self) -> None:
        """Raises UsageError if backward passes outside `model.step` cannot be followed."""

    def reduces_each(self, level: int) -> bool:
        """Whether gradients are added up after each microbatch, at a level of ZeRO."""
        return level >= 2 or self.steps_within

    def begin(self, num_parts: int, *, syncing: bool) -> int:
        """Prepares a batch.

        Args:
            num_parts: Number of this replica's microbatches.
            syncing: False within `no_sync`.

        Returns:
            The number of microbatches to run.

        Raises:
            UsageError: The policy does not allow such a batch.
        """
        return num_parts

    def loss(self, loss: Loss) -> Loss:
        """The loss whose gradients the policy needs, for a loss of sums and counts."""
        return loss

    def after_microbatches(self, num: int) -> None:
        """Runs when so many microbatches of this rank, or of its stage, have their gradients."""

    def reduce(self, names: set[str]) -> None:
        """Adds up gradients of one stage, for policies that step within `model.step`."""

    def presence(self) -> Tensor:
        """Marks of the used parameters, which the ranks add up before `settle`."""
        return self.reducer.presence()

    def settle(self, presence: Tensor, scale: float) -> None:
        """Sets `.grad` of the pieces to the replicas' sums times `scale`."""
        self.reducer.settle(presence, scale)

    def worked(self, busy_s: Sequence[float]) -> None:
        """Hears how long this rank worked in the step, for each of `PARTS`; before `step`."""

    def late(self, here: Late | None) -> Late | None:
        """The late rank: the one `here`, within a replica, unless the policy knows others."""
        return here

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> None:
        """Runs the optimizer's step; `clip` scales the gradients before."""
        clip()
        optimizer.step()
        self.reducer.publish()

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the place of `step` where a scaler skips one: all ranks do, so nothing moves."""


class WithinStep(UpdatePolicy):
    """Schedules without a flush: the optimizer steps after a few microbatches, in `model.step`.

    A gradient is that of the mean over one microbatch of all replicas, the i-th parts of their
    shares; an update of several microbatches has the mean of their gradients. Stages step at
    different times, so an update must not wait for another stage.

    Attributes:
        optimizer: The torch optimizer; None until `pc.optimizer` has made one.
    """

    steps_within, steps_alone = True, False

    def __init__(
        self, reducer: Reducer, schedule: str, group: AxisGroup, data_ranks: AxisGroup
    ) -> None:
        super().__init__(reducer)
        self.optimizer: torch.optim.Optimizer | None = None
        self._schedule, self._group, self._data_ranks = schedule, group, data_ranks
        self._left = 0

    def take(self, optimizer: torch.optim.Optimizer, clip: float | None) -> torch.optim.Optimizer:
        """Sets the optimizer that steps the stage; refuses `clip`."""
        if clip is not None:
            self.refuse_sums("clip")
        self.optimizer = optimizer
        return optimizer

    def refuse_sums(self, what: str) -> None:
        """Refuses what needs sums over all ranks."""
        raise UsageError(
            f"optimizer: {what} needs sums over all stages at once, and schedule "
            f"{self._schedule!r} steps each stage at its own time: leave {what} out, {FLUSH}"
        )

    def check_called_alone(self) -> None:
        """Refuses backward passes outside `model.step`."""
        raise UsageError(
            f"schedule {self._schedule!r} steps the optimizer within model.step: call "
            f"model.step(x, y, loss=...), {FLUSH}"
        )

    def begin(self, num_parts: int, *, syncing: bool) -> int:
        """Returns the most microbatches that any replica has; refuses `no_sync`."""
        if not syncing:
            raise UsageError(
                f"no_sync adds gradients up over steps, and schedule {self._schedule!r} steps the "
                f"optimizer at every microbatch: give model.step more at once, {FLUSH}"
            )
        if self.optimizer is None:
            raise UsageError(
                f"schedule {self._schedule!r} steps the optimizer within model.step: make it "
                "before, by pc.optimizer(...)"
            )
        most = torch.tensor([num_parts])
        if self._group.size > 1:
            self._group.all_reduce(most, "max")
        self._left, self.num_updates = int(most), 0
        return self._left

    def loss(self, loss: Loss) -> Loss:
        """Returns a loss whose gradient is that of the mean over the microbatch of all replicas."""

        def mean(output: Any, target: Any) -> tuple[Tensor, Any]:
            total, count = loss(output, target)
            counted = torch.tensor([int(count)])
            if self._group.size > 1:
                self._group.all_reduce(counted)
            if total.requires_grad:
                total.register_hook(lambda gradient: gradient / max(int(counted), 1))
            return total, count

        return mean

    def reduce(self, names: set[str]) -> None:
        """Adds up the replicas' gradients that a stage's backward left in `.grad`."""
        self.reducer.begin(reduce=True, staged=True)
        self.reducer.complete(names)
        self.reducer.finish()

    def after_microbatches(self, num: int) -> None:
        """Steps the stage by its reduced gradients; the last gradients stay readable."""
        assert self.optimizer is not None
        presence = self.reducer.presence()
        if self._data_ranks.size > 1 and len(presence):
            self._data_ranks.all_reduce(presence)
        self.reducer.settle(presence, 1.0 / num)
        self.optimizer.step()
        self.reducer.publish()
        self.num_updates += 1
        self._left -= num
        if self._left:
            self.reducer.clear()

    def presence(self) -> Tensor:
        """Nothing: the updates have settled it."""
        return torch.zeros(0, dtype=torch.float64)

    def settle(self, presence: Tensor, scale: float) -> None:
        """Keeps the gradients of the last update."""

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> None:
        """Does nothing: `model.step` has stepped."""


__all__ = ["UpdatePolicy", "WithinStep"]
