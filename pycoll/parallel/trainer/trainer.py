"""One training step on any mesh: forward, backward, and the gradients of one process.

The mean is exact to the token: losses are sums and counts, and the gradient is divided once by
the count of all replicas and microbatches, whatever their sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, overload

import torch
from torch import nn

from pycoll.parallel.core.batches import nothing, num_samples, split, to_floating
from pycoll.parallel.core.lateness import PARTS
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import Loss, Metrics, scaled, sums_and_counts
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.step_result import StepResult
from pycoll.parallel.features.context.sequence import Sequence
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.trainer.executors import Executor
from pycoll.parallel.trainer.passes import Passes, Share
from pycoll.parallel.trainer.update_policy import UpdatePolicy


class Scaler(Protocol):
    """What a step needs of a `pc.GradScaler`."""

    def is_enabled(self) -> bool: ...
    def get_scale(self) -> float: ...
    def follow(self, optimizer: Any, *, skipped: bool) -> None:
        """Adapts the scale to a step that all ranks have taken, or skipped."""


class Trainer:
    """Trains a model that `parallelize` has changed; the model offers the same methods.

    A step is: batches -> executor -> update policy -> metrics.

    Attributes:
        model: This rank's part of the model.
        mesh: The ranks.
        reducer: The parameters, their gradients, and their owners.
        parameters: This rank's parameters, by the first name that each has in the whole model.
        placements: Placements of these parameters, by name.
        positions: The current position in the batch, which dropout looks up.
        replicas: The ranks whose gradients are added up.
        data_ranks: The replicas, and other ranks whose tokens may use other parameters.
        sequence: The sequence of a batch, of which cp gives this rank a share.
        executor: Passes microbatches through the model.
        policy: Says when the optimizer steps, and by which gradients.
        output: Dtype of the model's output; None: unchanged.
        last: The last step's result.
        scaler: The scaler of the last step.
        syncing: False within `no_sync`.
        in_step: True while `step` or `evaluate` runs the model.
        watchers: Functions called after the step of `pc.optimizer`.
        steppers: Functions called after the step of any optimizer.
        clearers: Functions called when gradients are cleared.
        busy_s: Seconds in which this rank worked in the last step, for each of `PARTS`.
        ended_ns: When the last step ended, on CLOCK_MONOTONIC; 0 before the first one.
        finish_saving: Waits for a checkpoint that is being written.
        run: Passes a share of a batch through the model, as `Passes.run` does.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        reducer: Reducer,
        parameters: dict[str, nn.Parameter],
        placements: dict[str, Placement],
        positions: Positions,
        *,
        replicas: AxisGroup,
        data_ranks: AxisGroup,
        sequence: Sequence,
        executor: Executor,
        policy: UpdatePolicy,
        output: torch.dtype | None = None,
    ) -> None:
        self.model, self.mesh, self.reducer = model, mesh, reducer
        self.parameters = parameters
        self.placements, self.positions = placements, positions
        self.replicas, self.data_ranks, self.sequence = replicas, data_ranks, sequence
        self.executor, self.policy, self.output = executor, policy, output
        self.step_idx = 0
        self.last: StepResult | None = None
        self.scaler: Scaler | None = None
        self.syncing, self.in_step = True, False
        self.watchers: list[Callable[[Trainer], None]] = []
        self.steppers: list[Callable[[], None]] = []
        self.clearers: list[Callable[[], None]] = []
        self.finish_saving: Callable[[], Any] = lambda: None
        self.busy_s, self.ended_ns = [0.0] * len(PARTS), 0
        self._samples = mesh.line_of_dp("ep")
        self._passes = Passes(executor, policy, reducer, mesh.dealing())
        self.run = self._passes.run
        self._settled = False
        self._sums, self._count = self._passes.no_losses(), 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients of steps within the context; the next step outside reduces them."""
        self.syncing, before = False, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    def step(
        self,
        x: Any,
        y: Any = None,
        *,
        loss: Loss,
        microbatches: int = 1,
        scaler: Scaler | None = None,
    ) -> StepResult:
        """Forward and backward passes over a batch, and the reduction of the gradients.

        Args:
            x: This replica's share of the batch, identical on all ranks of the replica: a tensor
                whose first dimension counts samples, or a tuple or dict of them. It may be empty.
            y: The targets, likewise.
            loss: Called with a microbatch's output and targets; returns a sum and a count, or a
                mean over all targets other than -100.
            microbatches: Number of parts into which the share is split.
            scaler: A `pc.GradScaler`: gradients are scaled in the backward pass, and back before
                they are seen. If one of any rank is not finite, the optimizer's step skips on all.

        Returns:
            The result. `parameter.grad` and the optimizer hold the gradient of the mean.

        Raises:
            UsageError: `microbatches` is less than 1, or a scaler comes with a schedule that steps
                the optimizer within the step.
            Error: The error of a failed collective. A forward that differs between ranks raises
                CollectiveMismatchError, which names both calls.

        Cost: each parameter's gradient is reduced once over its replicas, plus one array with a
            float64 for each parameter.
        """
        start_ns, ledger = time.monotonic_ns(), self.mesh.ledger
        waited_before, start = ledger.waited_s, ledger.clock.now()
        unused_before = () if self.last is None else self.last.unused
        if self._settled:
            self.reducer.clear()
            self._settled = False
            self._sums, self._count = self._passes.no_losses(), 0
        x, y = to_floating(x, self.model), to_floating(y, self.model)
        between_s = (start_ns - self.ended_ns) / 1e9 if self.ended_ns else 0.0
        first_sample, num_all = self.place_of(num_samples(x))
        self.positions.move(step=self.step_idx)
        self.scaler, scale = scaler, 1.0
        if scaler is not None and scaler.is_enabled():
            self.policy.refuse_sums("a scaler")
            scale = scaler.get_scale()
        losses = self.policy.loss(scaled(self._losses(loss), scale))
        with self.within_step():
            share = Share(x, y, microbatches, first_sample, num_all)
            sums, ran = self.run(share, losses, reduce=self.syncing)
        self._sums += sums
        self._count += ran.count
        total, count = (
            self._settle(scale) if self.syncing else (float(self._sums.sum()), self._count)
        )
        ledger.span(f"step {self.step_idx}", "steps", start, ledger.clock.now())
        waited_s = ledger.waited_s - waited_before  # on a device, the end of the pass
        unused = tuple(self.reducer.unused)
        self.last = StepResult(
            step=self.step_idx,
            loss=total / count if count else 0.0,
            tokens=count,
            seconds=(time.monotonic_ns() - start_ns) / 1e9,
            waited_s=waited_s,
            bubble_s=ran.bubble_s,
            unused=unused,
            unused_now=tuple(name for name in unused if name not in unused_before),
            rank=self.mesh.world.rank,
            updates=self.policy.num_updates,
            staleness=ran.staleness,
            samples=num_all,
            ranks=self.mesh.world.size,
        )
        busy_s = {"between steps": between_s, **ran.busy_s}
        self.busy_s = [busy_s.get(part, 0.0) for part in PARTS]
        self.ended_ns = time.monotonic_ns()
        self.step_idx += 1
        return self.last

    def place_of(self, mine: int) -> tuple[int, int]:
        """Place of this replica's first sample in the batch of all replicas, and its size."""
        if self._samples.size == 1 or not (self.model.training or self.mesh.virtual_replicas):
            return 0, mine
        counts = torch.empty(self._samples.size, dtype=torch.int64)
        self._samples.comm.all_gather(torch.tensor([mine]), out=counts)
        return int(counts[: self._samples.rank].sum()), int(counts.sum())

    def _losses(self, loss: Loss) -> Loss:
        return self.sequence.of_shares(sums_and_counts(loss, self.output))

    @contextmanager
    def within_step(self) -> Iterator[None]:
        """For passes after which the plain loop (trainer/plain_loop.py) has nothing to do."""
        self.in_step, before = True, self.in_step
        try:
            yield
        finally:
            self.in_step = before

    @overload
    def evaluate(self, x: Any, y: Any, *, loss: Loss, microbatches: int = 1) -> float: ...
    @overload
    def evaluate(
        self, x: Any, y: Any, *, loss: Loss, metrics: Mapping[str, Loss], microbatches: int = 1
    ) -> dict[str, float]: ...
    def evaluate(
        self,
        x: Any,
        y: Any,
        *,
        loss: Loss,
        metrics: Mapping[str, Loss] | None = None,
        microbatches: int = 1,
    ) -> float | dict[str, float]:
        """The mean loss of a batch, by forward passes only; arguments as in `step`. Collective.

        Args:
            x: This replica's share of the batch.
            y: The targets.
            loss: Returns a sum and a count, or a mean.
            metrics: Other functions of the output and the targets, by name, that return the same,
                such as the number of right answers and the number of answers.
            microbatches: Number of parts.

        Returns:
            The mean; with `metrics`, a dict with "loss" and the mean of each metric.

        Cost: an all_reduce of two numbers for the loss and for each metric.
        """
        first_sample, _ = self.place_of(num_samples(x))  # dropout, in a model that is training
        self.positions.move(step=self.step_idx)
        parts = split(x, y, microbatches)
        if self.executor.evaluates_empty:
            parts += [nothing(x, y)] * (microbatches - len(parts))
        gathered = Metrics(metrics or {}, self._losses)
        with torch.no_grad(), self.within_step():
            losses = gathered.beside(self._losses(loss))
            found = self.executor.evaluate(parts, losses, first_sample)
        sums = torch.tensor(found, dtype=torch.float64)
        if self.replicas.size > 1:
            self.replicas.all_reduce(sums)
        mean = float(sums[0] / sums[1]) if sums[1] else 0.0
        if metrics is None:
            return mean
        return {"loss": mean, **gathered.means(self.mesh.line_of_dp("pp", "ep", "cp"))}

    def _settle(self, scale: float) -> tuple[float, int]:
        """Returns the loss sum and count of all replicas; divides gradients by count and scale."""
        tail = torch.cat([self._sums, torch.tensor([self._count], dtype=torch.float64)])
        if self.data_ranks.size > self.replicas.size and self.mesh.rank("tp") > 0:
            tail.zero_()  # all ranks of tp have the same loss; rank 0's counts
        tail = torch.cat([tail, self.policy.presence()])
        if self.data_ranks.size > 1:
            self.data_ranks.all_reduce(tail)
        num_sums = len(self._sums)
        total, count = float(tail[:num_sums].sum()), int(tail[num_sums])
        self.policy.settle(tail[num_sums + 1 :], 1.0 / max(count, 1) / scale)
        self._settled = True
        return total, count

    def settle_mean(self) -> None:
        """Sets `.grad` to the mean of the replicas' gradients, after a backward pass."""
        presence = self.reducer.presence()
        if self.data_ranks.size > 1:
            self.data_ranks.all_reduce(presence)
        self.reducer.settle(presence, 1.0 / self._samples.size)
        self.reducer.detach()
        self._settled = True

    def stepped(self) -> None:
        """Says that an optimizer has stepped."""
        for stepper in self.steppers:
            stepper()

    def clear(self) -> None:
        """Clears the gradients after the optimizer's step."""
        self.reducer.clear()
        for clearer in self.clearers:
            clearer()
        self._settled = False
        self._sums, self._count = self._passes.no_losses(), 0


__all__ = ["StepResult", "Trainer"]
