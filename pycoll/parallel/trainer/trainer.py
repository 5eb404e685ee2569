"""One training step on any mesh: forward, backward, and the gradients of one process.

The mean is exact to the token: losses are sums and counts, and the gradient is divided once by
the count of all replicas and microbatches, whatever their sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pycoll.parallel.context.sequence import Sequence
from pycoll.parallel.core.batches import as_call, nothing, num_samples, split, to_floating
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import Loss, sums_and_counts
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.core.step_result import StepResult
from pycoll.parallel.data.reducer import Reducer
from pycoll.parallel.dropout.dropout import Positions
from pycoll.parallel.trainer.plain_loop import PlainLoop

if TYPE_CHECKING:
    from pycoll.parallel.trainer.pipeline_step import Pipeline
    from pycoll.parallel.trainer.update_policy import Updates


class Trainer:
    """Trains a model that `parallelize` has changed; the model offers the same methods.

    Attributes:
        model: This rank's part of the model.
        mesh: The ranks.
        reducer: The parameters, their gradients, and their owners.
        parameters: This rank's parameters, by the first name that each has in the whole model.
        placements: Placements of these parameters, by name.
        positions: The current position in the batch, which dropout looks up.
        replicas: The ranks whose gradients are added up.
        data_ranks: The replicas, and other ranks whose tokens may use other parameters.
        last: The last step's result.
        updates: Updates of a schedule that steps within `step`; None: the optimizer steps after it.
        sequence: The sequence of a batch, of which cp gives this rank a share.
        loop: Reduces the gradients of backward passes outside `step`.
        syncing: False within `no_sync`.
        watchers: Functions called after the optimizer's step.
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
        needs_barrier: bool = False,
        pipeline: Pipeline | None = None,
        updates: Updates | None = None,
    ) -> None:
        self.model, self.mesh, self.reducer = model, mesh, reducer
        self.updates = updates
        self.parameters = parameters
        self.placements, self.positions = placements, positions
        self.step_idx = 0
        self.last: StepResult | None = None
        self.watchers: list[Callable[[Trainer], None]] = []
        self._pipeline = pipeline
        self.replicas, self.data_ranks, self.sequence = replicas, data_ranks, sequence
        self._samples = mesh.line_of_dp("ep")
        self.syncing = True
        self._settled = False
        self._sum, self._count = 0.0, 0
        if pipeline is not None:
            pipeline.reducer, pipeline.updates = reducer, updates
        self._bubble_s, self._staleness = 0.0, 0
        # Layers that communicate with the other replicas also run on an empty batch.
        self._needs_barrier = needs_barrier
        self._collective_metrics = needs_barrier or reducer.level == 3 or updates is not None
        self.loop = PlainLoop(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients of steps within the context; the next step outside reduces them."""
        self.syncing, before = False, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    def step(self, x: Any, y: Any = None, *, loss: Loss, microbatches: int = 1) -> StepResult:
        """Forward and backward passes over a batch, and the reduction of the gradients.

        Args:
            x: This replica's share of the batch, identical on all ranks of the replica: a tensor
                whose first dimension counts samples, or a tuple or dict of them. It may be empty.
            y: The targets, likewise.
            loss: Called with a microbatch's output and targets; returns a sum and a count, or a
                mean over all targets other than -100.
            microbatches: Number of parts into which the share is split.

        Returns:
            The result. `parameter.grad` and the optimizer hold the gradient of the mean.

        Raises:
            UsageError: `microbatches` is less than 1.
            Error: The error of a failed collective. A forward that differs between ranks raises
                CollectiveMismatchError, which names both calls.

        Cost: each parameter's gradient is reduced once over its replicas, plus one array with a
            float64 for each parameter.
        """
        with self.loop.off():
            return self._step(x, y, loss, microbatches)

    def _step(self, x: Any, y: Any, loss: Loss, microbatches: int) -> StepResult:
        start_ns = time.monotonic_ns()
        waited_before = self.mesh.ledger.waited_s
        unused_before = () if self.last is None else self.last.unused
        if self._settled:
            self.reducer.clear()
            self._settled = False
            self._sum, self._count = 0.0, 0
        x, y = to_floating(x, self.model), to_floating(y, self.model)
        first_sample, _ = self.place_of(num_samples(x))
        self.positions.move(step=self.step_idx)
        parts, losses = split(x, y, microbatches), self._losses(loss)
        if self.updates is not None:
            num_updates = self.updates.begin(len(parts), syncing=self.syncing)
            parts += [nothing(x, y)] * (num_updates - len(parts))
            losses = self.updates.of_means(losses)
        elif self._needs_barrier or (self._pipeline is None and self.reducer.level >= 2):
            parts += [nothing(x, y)] * (microbatches - len(parts))
        if self._pipeline is None:
            self._run(parts, losses, first_sample)
        else:
            self._run_pipeline(self._pipeline, parts, losses, first_sample)
        total, count = self._sum, self._count
        if self.syncing:
            total, count = self._settle()
        self.mesh.ledger.span(f"step {self.step_idx}", "steps", start_ns, time.monotonic_ns())
        self.last = StepResult(
            step=self.step_idx,
            loss=total / count if count else 0.0,
            tokens=count,
            seconds=(time.monotonic_ns() - start_ns) / 1e9,
            waited_s=self.mesh.ledger.waited_s - waited_before,
            bubble_s=self._bubble_s,
            unused=tuple(self.reducer.unused),
            unused_now=tuple(name for name in self.reducer.unused if name not in unused_before),
            rank=self.mesh.world.rank,
            updates=0 if self.updates is None else len(parts),
            staleness=self._staleness,
        )
        self.step_idx += 1
        return self.last

    def place_of(self, mine: int) -> tuple[int, int]:
        """Place of this replica's first sample in the batch of all replicas, and its size."""
        if not self.model.training or self._samples.size == 1:
            return 0, mine
        counts = torch.empty(self._samples.size, dtype=torch.int64)
        self._samples.comm.all_gather(torch.tensor([mine]), out=counts)
        return int(counts[: self._samples.rank].sum()), int(counts.sum())

    def _losses(self, loss: Loss) -> Loss:
        return self.sequence.of_shares(sums_and_counts(loss))

    def stands_in(self) -> bool:
        """Whether a pipeline stage runs the modules before its blocks, on blank values."""
        return self._pipeline is not None and self._pipeline.cut.stands_in

    def evaluate(self, x: Any, y: Any, *, loss: Loss, microbatches: int = 1) -> float:
        """The mean loss of a batch, by forward passes only; arguments as in `step`. Collective."""
        parts, losses = split(x, y, microbatches), self._losses(loss)
        if self._needs_barrier or (self._pipeline is None and self.reducer.level == 3):
            parts += [nothing(x, y)] * (microbatches - len(parts))
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), self.loop.off():
            if self._pipeline is None:
                for x_part, y_part in parts:
                    sums += torch.tensor([float(n) for n in losses(self._forward(x_part), y_part)])
            elif parts:
                with self._gathered():
                    result = self._pipeline.run(parts, losses, 0, train=False)
                sums += torch.tensor([result.loss_sum, result.count])
        if self.replicas.size > 1:
            self.replicas.all_reduce(sums)
        return float(sums[0] / sums[1]) if sums[1] else 0.0

    def _forward(self, x: Any) -> Any:
        args, kwargs = as_call(x)
        return self.model(*args, **kwargs)

    def _run(self, parts: list[tuple[Any, Any]], loss: Loss, first_sample: int) -> None:
        # Sharded gradients are reduced after each microbatch: kept longer, they would be whole. So
        # all replicas take part for each microbatch, with an empty one if necessary.
        each = self.reducer.level >= 2 or self.updates is not None
        for i, (x, y) in enumerate(parts):
            count = num_samples(x)
            self.positions.move(first_sample=first_sample, num_samples=count)
            first_sample += count
            reduces = self.syncing and (each or i + 1 == len(parts))
            self.reducer.begin(reduce=reduces)
            if count or self._collective_metrics:
                with self._span("forward"):
                    part_sum, part_count = loss(self._forward(x), y)
                with self._span("backward"):
                    part_sum.backward()
                self._sum += float(part_sum.detach())
                self._count += int(part_count)
            if reduces:
                self.reducer.finish()
            if self.updates is not None:
                self.updates.step()
        if not parts and self.syncing:
            self.reducer.finish()  # the other replicas wait for this one's zeros

    def _run_pipeline(
        self, pipeline: Pipeline, parts: list[tuple[Any, Any]], loss: Loss, first_sample: int
    ) -> None:
        self._bubble_s, self._staleness = 0.0, 0
        self.reducer.begin(reduce=self.syncing, staged=True)
        if parts:
            with self._gathered():
                result = pipeline.run(parts, loss, first_sample, train=True)
            self._sum += result.loss_sum
            self._count += int(result.count)
            self._bubble_s = result.time_s - result.busy_s
            self._staleness = max(result.staleness.values(), default=0)
            self.reducer.complete(pipeline.cut.shared)
        if self.syncing and self.updates is None:
            self.reducer.finish()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gathers the parameters that ZeRO 3 shards, since a pipeline uses them many times."""
        for bucket in self.reducer.buckets:
            bucket.gather()
        yield
        for bucket in self.reducer.buckets:
            bucket.drop()

    def _settle(self) -> tuple[float, int]:
        """Returns the loss sum and count of all replicas, and divides gradients by the count."""
        tail = torch.tensor([self._sum, self._count], dtype=torch.float64)
        if self.data_ranks.size > self.replicas.size and self.mesh.rank("tp") > 0:
            tail.zero_()  # all ranks of tp have the same loss; rank 0's counts
        if self.updates is None:
            tail = torch.cat([tail, self.reducer.presence()])
        if self.data_ranks.size > 1:
            self.data_ranks.all_reduce(tail)
        total, count = float(tail[0]), int(tail[1])
        if self.updates is None:
            self.reducer.settle(tail[2:], 1.0 / max(count, 1))
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

    def clear(self) -> None:
        """Clears the gradients after the optimizer's step."""
        self.reducer.clear()
        self.loop.clear()
        self._settled = False
        self._sum, self._count = 0.0, 0

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        self.mesh.ledger.span(name, "compute", start_ns, time.monotonic_ns())


__all__ = ["StepResult", "Trainer"]
