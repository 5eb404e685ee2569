"""One training step on any mesh: forward, backward, and gradients that are those of one process.

The mean is exact to the token: losses are sums and counts, and one division by the count of all
replicas and microbatches makes the gradient, whatever their sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.parallel.batches import num_samples, split, to_floating
from pycoll.parallel.data.reducer import Reducer
from pycoll.parallel.dropout import Position, Positions
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.placement import Placement
from pycoll.parallel.tensor.vocab import whole

Loss = Callable[[Any, Any], Any]
_IGNORED = -100  # as torch's ignore_index


@dataclass(slots=True)
class StepResult:
    """What a step computed; the same numbers on every rank, but for times.

    Attributes:
        step: Its number, from 0.
        loss: Mean over all tokens of all replicas.
        tokens: How many there were: what the loss counts.
        seconds: From begin to end of `model.step` here.
        waited_s: Of these, how long this rank waited for collectives and messages.
        bubble_s: Of these, how long its pipeline stage had nothing to do.
        grad_norm: Of all gradients, before clipping; set by the optimizer's step.
        unused: Names of this rank's parameters that no replica used.
        unused_now: Of these, those that were used in the step before, or in the first step.
        rank: That of this process.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    waited_s: float
    bubble_s: float = 0.0
    grad_norm: float | None = None
    unused: tuple[str, ...] = ()
    unused_now: tuple[str, ...] = ()
    rank: int = 0


class Trainer:
    """What `parallelize` has made of a model; its methods are those of the model, too.

    Attributes:
        model: The model, of which this rank has its part.
        mesh: The ranks.
        reducer: The parameters, their gradients, and whose they are.
        placements: Of this rank's parameters, by full name.
        positions: Where in the batch the model is: dropout looks there.
        last: The last step's result.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        reducer: Reducer,
        placements: dict[str, Placement],
        positions: Positions,
        *,
        drops: bool,
        runtime: Any = None,
    ) -> None:
        self.model, self.mesh, self.reducer = model, mesh, reducer
        self.placements, self.positions = placements, positions
        self.step_idx = 0
        self.last: StepResult | None = None
        self.watchers: list[Callable[[Trainer], None]] = []  # called after the optimizer's step
        self._drops, self._runtime = drops, runtime
        self._line = mesh.line("dp")
        self._syncing = True
        self._settled = False
        self._sum, self._count = 0.0, 0
        reducer.hooked = runtime is None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps within the context only add to the gradients; the next one outside reduces them."""
        self._syncing, before = False, self._syncing
        try:
            yield
        finally:
            self._syncing = before

    def step(self, x: Any, y: Any = None, *, loss: Loss, microbatches: int = 1) -> StepResult:
        """Forward and backward passes over a batch, and the reduction of the gradients.

        Args:
            x: This replica's share of the batch, alike on all ranks of the replica: a tensor whose
                first dimension counts samples, or a tuple or dict of them. It may have no sample.
            y: The targets, likewise.
            loss: Called with a microbatch's output and targets; returns a sum and a count, or a
                mean, which counts as many as there are targets (other than -100).
            microbatches: Into how many parts the share is split.

        Returns:
            The result; `parameter.grad` and the optimizer know the mean's gradient.

        Raises:
            UsageError: No microbatch.
            Error: What ended a collective; a model whose forward differs between ranks is a
                CollectiveMismatchError, which names both calls.

        Cost: each parameter's gradient is reduced once over its replicas, and one array of as many
            float64 as there are parameters.
        """
        start_ns = time.monotonic_ns()
        waited_before = self.mesh.ledger.waited_s
        unused_before = () if self.last is None else self.last.unused
        if self._settled:
            self.reducer.clear()
            self._settled = False
            self._sum, self._count = 0.0, 0
        x, y = to_floating(x, self.model), to_floating(y, self.model)
        first_sample = self._first_sample(num_samples(x))
        self.positions.move(step=self.step_idx)
        losses = sums_and_counts(loss)
        if self._runtime is None:
            self._run(x, y, losses, microbatches, first_sample)
        else:
            self._run_pipeline(x, y, losses, microbatches, first_sample)
        total, count = self._sum, self._count
        if self._syncing:
            total, count = self._settle()
        self.mesh.ledger.span(f"step {self.step_idx}", "steps", start_ns, time.monotonic_ns())
        self.last = StepResult(
            step=self.step_idx,
            loss=total / count if count else 0.0,
            tokens=count,
            seconds=(time.monotonic_ns() - start_ns) / 1e9,
            waited_s=self.mesh.ledger.waited_s - waited_before,
            bubble_s=getattr(self._runtime, "bubble_s", 0.0),
            unused=tuple(self.reducer.unused),
            unused_now=tuple(name for name in self.reducer.unused if name not in unused_before),
            rank=self.mesh.world.rank,
        )
        self.step_idx += 1
        return self.last

    def _first_sample(self, mine: int) -> int:
        """Place of this replica's first sample in the batch of all."""
        if not self._drops or not self.model.training or self._line.size == 1:
            return 0
        counts = self._line.all_gather(torch.tensor([mine]), [1] * self._line.size)
        return int(counts[: self._line.rank].sum())

    def _run(self, x: Any, y: Any, loss: Loss, microbatches: int, first_sample: int) -> None:
        parts = split(x, y, microbatches)
        for i, (x_part, y_part) in enumerate(parts):
            count = num_samples(x_part)
            self.positions.move(first_sample=first_sample, num_samples=count)
            first_sample += count
            # Gradients that ZeRO shares out are reduced at once: kept, they would be whole.
            reduces = self._syncing and (self.reducer.level >= 2 or i + 1 == len(parts))
            self.reducer.begin(reduce=reduces)
            with self._span("forward"):
                part_sum, part_count = loss(self.model(x_part), y_part)
            with self._span("backward"):
                part_sum.backward()
            self._sum += float(part_sum.detach())
            self._count += int(part_count)
            if reduces:
                self.reducer.finish()
        if not parts and self._syncing:
            self.reducer.finish()  # the other replicas wait for this one's zeros

    def _run_pipeline(
        self, x: Any, y: Any, loss: Loss, microbatches: int, first_sample: int
    ) -> None:
        if num_samples(x):

            def context(idx: int, first: int, count: int) -> AbstractContextManager[None]:
                return self.positions.at(Position(self.step_idx, first_sample + first, count))

            for bucket in self.reducer.buckets:
                bucket.gather()
            self._runtime.microbatch_context = context
            result = self._runtime.step(x, y, loss_fn=loss, microbatches=microbatches)
            self._sum += float(result.loss_sum)
            self._count += int(result.count)
            for bucket in self.reducer.buckets:
                bucket.drop()
        self.reducer.collect(reduce=self._syncing)

    def _settle(self) -> tuple[float, int]:
        """The loss of all replicas, and gradients divided by what it counts."""
        tail = torch.cat(
            [
                torch.tensor([self._sum, self._count], dtype=torch.float64),
                self.reducer.presence(),
            ]
        )
        if self._line.size > 1:
            self._line.all_reduce(tail)
        total, count = float(tail[0]), int(tail[1])
        self.reducer.settle(tail[2:], 1.0 / max(count, 1))
        self._settled = True
        return total, count

    def clear(self) -> None:
        """Forgets the gradients: the optimizer has taken its step."""
        self.reducer.clear()
        self._settled = False
        self._sum, self._count = 0.0, 0

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        self.mesh.ledger.span(name, "compute", start_ns, time.monotonic_ns())


def sums_and_counts(loss: Loss) -> Loss:
    """A loss that always returns a sum and a count, and gets whole outputs where it needs them."""

    def summed(output: Any, target: Any) -> tuple[Tensor, int]:
        if not getattr(loss, "takes_parts", False):
            output = whole(output)
        result = loss(output, target)
        if isinstance(result, tuple):
            return result[0], int(result[1])
        count = len(target) if not isinstance(target, Tensor) else target.numel()
        if isinstance(target, Tensor) and not target.is_floating_point():
            count = int((target != _IGNORED).sum())
        return result * count, count

    return summed


__all__ = ["Loss", "StepResult", "Trainer"]
