"""How a batch passes through the model: as a whole on each rank (`Plain`), or in stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from torch import nn

from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.core.batches import as_call, num_samples
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.core.losses import Loss, numbers
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.transfers import Transfers
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.trainer.update_policy import UpdatePolicy

Parts = list[tuple[Any, Any]]  # input and targets of each microbatch


@dataclass(frozen=True, slots=True)
class Ran:
    """What passing a batch through the model gave.

    Attributes:
        loss_sum: Sum of the losses.
        count: Number of their targets.
        bubble_s: Seconds in which this rank waited for other stages.
        staleness: The most updates between a forward and its backward.
        busy_s: Seconds in which this rank worked without waiting, by part of the step.
    """

    loss_sum: float = 0.0
    count: int = 0
    bubble_s: float = 0.0
    staleness: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)


class Executor(Protocol):
    """Runs microbatches.

    Attributes:
        runs_empty: Every rank runs as many microbatches as the others, with empty ones if need be.
        evaluates_empty: Likewise for forward passes alone.
        stands_in: A stage runs the modules before its blocks, on blank values.
    """

    @property
    def runs_empty(self) -> bool: ...
    @property
    def evaluates_empty(self) -> bool: ...
    @property
    def stands_in(self) -> bool: ...

    def run(self, parts: Parts, loss: Loss, first_sample: int, *, reduce: bool) -> Ran:
        """Forward and backward passes.

        Args:
            parts: The microbatches, identical on all ranks of a replica.
            loss: Returns a sum and a count.
            first_sample: Place of the first sample in the batch of all replicas.
            reduce: Whether to add the gradients up over the replicas.
        """

    def evaluate(self, parts: Parts, loss: Loss, first_sample: int) -> tuple[float, float]:
        """The sum of the losses and their count, by forward passes alone."""

    def check_called_alone(self) -> None:
        """Raises UsageError if the model cannot be called by itself."""


class Plain:
    """The whole model is here."""

    stands_in = False

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        positions: Positions,
        policy: UpdatePolicy,
        ledger: Ledger,
        *,
        needs_barrier: bool,
    ) -> None:
        self._model, self._reducer, self._positions = model, reducer, positions
        self._policy, self._ledger = policy, ledger
        # Layers that communicate with the other replicas also run on an empty batch. Sharded
        # gradients are reduced after each microbatch: kept longer, they would be whole.
        self._each = policy.reduces_each(reducer.level)
        self.runs_empty = not policy.steps_within and (needs_barrier or reducer.level >= 2)
        self.evaluates_empty = needs_barrier or reducer.level == 3
        self._computes_empty = self.evaluates_empty or policy.steps_within

    def run(self, parts: Parts, loss: Loss, first_sample: int, *, reduce: bool) -> Ran:
        """See Executor."""
        sums: list[Any] = []
        counts: list[Any] = []
        busy_s = {"forward": 0.0, "backward": 0.0}
        for i, (x, y) in enumerate(parts):
            count = num_samples(x)
            self._positions.move(first_sample=first_sample, num_samples=count)
            first_sample += count
            reduces = reduce and (self._each or i + 1 == len(parts))
            self._reducer.begin(reduce=reduces)
            if count or self._computes_empty:
                with self._span("forward", busy_s):
                    part_sum, part_count = loss(self._forward(x), y)
                with self._span("backward", busy_s):
                    part_sum.backward()
                sums.append(part_sum.detach())
                counts.append(part_count)
            if reduces:
                self._reducer.finish()
            self._policy.after_microbatches(1)
        if not parts and reduce:
            self._reducer.finish()  # the other replicas wait for this one's zeros
        return Ran(sum(numbers(sums)), int(sum(numbers(counts))), busy_s=busy_s)

    def evaluate(self, parts: Parts, loss: Loss, first_sample: int) -> tuple[float, float]:
        """See Executor."""
        found = []
        for x, y in parts:
            count = num_samples(x)
            self._positions.move(first_sample=first_sample, num_samples=count)
            first_sample += count
            found.append(loss(self._forward(x), y))
        return sum(numbers(of for of, _ in found)), sum(numbers(count for _, count in found))

    def check_called_alone(self) -> None:
        """It can be."""

    def _forward(self, x: Any) -> Any:
        args, kwargs = as_call(x)
        return self._model(*args, **kwargs)

    @contextmanager
    def _span(self, name: str, busy_s: dict[str, float]) -> Iterator[None]:
        start, start_ns = self._ledger.clock.now(), time.monotonic_ns()
        waited_before = self._ledger.waited_s
        yield
        self._ledger.span(name, "compute", start, self._ledger.clock.now())
        worked_s = (time.monotonic_ns() - start_ns) / 1e9
        busy_s[name] += worked_s - (self._ledger.waited_s - waited_before)


class Pipelined:
    """This rank has some stages, and a runtime that steps them by a schedule."""

    def __init__(
        self,
        cut: pipeline.Cut,
        schedule: pipeline.Schedule,
        mesh: Mesh,
        reducer: Reducer,
        positions: Positions,
        policy: UpdatePolicy,
        *,
        needs_barrier: bool,
        split_backward: bool,
        ranks: Communicator | None = None,
    ) -> None:
        """Makes the runtime.

        Args:
            cut: The model's stages.
            schedule: For any number of microbatches; its name builds the others.
            mesh: The ranks.
            reducer: Adds a stage's gradients up as soon as they are complete, while other stages
                compute.
            positions: Receives the samples of each microbatch.
            policy: Updates a stage after each of its microbatches, for schedules without a flush.
            needs_barrier: All replicas run as many microbatches.
            split_backward: Whether gradients of inputs may be computed before those of weights.
            ranks: The ranks of the pipeline; None: those along pp.
        """
        self._on = partial(
            Pipelined,
            cut,
            schedule,
            mesh,
            reducer,
            positions,
            policy,
            needs_barrier=needs_barrier,
            split_backward=split_backward,
        )
        self._cut, self._mesh, self._reducer = cut, mesh, reducer
        self._positions, self._policy = positions, policy
        self.runs_empty = needs_barrier and not policy.steps_within
        self.evaluates_empty = needs_barrier
        self._own = {stage: cut.own(stage) for stage in cut.local_stages}
        self._firsts: list[tuple[int, int]] = []  # by microbatch: first sample, number of samples
        steps = policy.steps_within

        def expect(stage: int) -> None:
            reducer.expect(self._own[stage])

        def complete(stage: int) -> None:
            reducer.complete(self._own[stage])

        self._runtime = pipeline.PipelineRuntime(
            cut,
            schedule.name,
            ranks or mesh.comm("pp"),
            transfers=mesh.transfers("pp") if ranks is None else Transfers(ranks),
            device=str(mesh.device),
            clock=mesh.ledger.clock,
            on_microbatch=self._move,
            on_last_backward=None if steps else expect,
            on_weight_grad_ready=None if steps else complete,
            update=self._update if steps else None,
            split_backward=split_backward,
        )

    def on(self, ranks: Communicator) -> Pipelined:
        """The same stages in a pipeline of other ranks, in the order of the stages."""
        return self._on(ranks=ranks)

    @property
    def stands_in(self) -> bool:
        """Whether the modules before the blocks run on blank values."""
        return self._cut.stands_in

    def run(self, parts: Parts, loss: Loss, first_sample: int, *, reduce: bool) -> Ran:
        """See Executor."""
        self._reducer.begin(reduce=reduce, staged=True)
        ran = Ran()
        if parts:
            result = self._pass(parts, loss, first_sample, train=True)
            self._reducer.complete(self._cut.shared)
            staleness = max(result.staleness.values(), default=0)
            bubble_s = result.time_s - result.busy_s
            busy_s = {"stages": result.busy_s}
            ran = Ran(result.loss_sum, int(result.count), bubble_s, staleness, busy_s)
        if reduce and not self._policy.steps_within:
            self._reducer.finish()
        return ran

    def evaluate(self, parts: Parts, loss: Loss, first_sample: int) -> tuple[float, float]:
        """See Executor."""
        if not parts:
            return 0.0, 0.0
        result = self._pass(parts, loss, first_sample, train=False)
        return result.loss_sum, result.count

    def check_called_alone(self) -> None:
        """It cannot be."""
        refuse_call(self._mesh)

    def _pass(self, parts: Parts, loss: Loss, first_sample: int, *, train: bool) -> Any:
        """Passes microbatches through all stages; every rank has the sum and the count."""
        self._firsts = []
        for x, _ in parts:
            self._firsts.append((first_sample, num_samples(x)))
            first_sample += num_samples(x)
        run = self._runtime.step if train else self._runtime.evaluate
        with self._reducer.gathered():  # a pipeline uses sharded parameters many times
            result = run([x for x, _ in parts], [y for _, y in parts], loss_fn=loss)
        for moment in result.moments:
            name, track = str(moment.action), "bubble" if moment.waited else "compute"
            self._mesh.ledger.span(name, track, moment.start_ns, moment.end_ns)
        entry = self._mesh.ledger.of("pp", "send")
        entry.calls += 1
        entry.nbytes += result.sent_bytes
        return result

    def _update(self, stage: int, microbatch: int) -> None:
        self._policy.reduce(self._own[stage])
        schedule = self._runtime.schedule_of(len(self._firsts))
        self._policy.after_microbatches(len(schedule.round_of(stage, microbatch)))

    def _move(self, microbatch: int) -> None:
        first, count = self._firsts[microbatch]
        self._positions.move(first_sample=first, num_samples=count)


def refuse_call(mesh: Mesh) -> NoReturn:
    """Refuses a call of a model of which each rank of pp has a part."""
    raise UsageError(
        f"pp={mesh.size('pp')}: this rank has only a stage of the model, so model(x) cannot run: "
        "call model.step(x, y, loss=...), or model.evaluate"
    )


__all__ = ["Executor", "Parts", "Pipelined", "Plain", "Ran", "refuse_call"]
