"""The pipeline of a parallelized model: this rank's stages, and the runtime that steps them."""

from __future__ import annotations

from typing import Any

from torch import nn

from pycoll.parallel import pipeline
from pycoll.parallel.core.batches import num_samples
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.data.reducer import Reducer
from pycoll.parallel.dropout.dropout import Positions
from pycoll.parallel.trainer.update_policy import Updates


class Pipeline:
    """This rank's stages of a model.

    Attributes:
        cut: The cut model: which stages are where.
        reducer: Reduces a stage's gradients over the replicas as soon as they are complete,
            while other stages compute.
        updates: Updates a stage after each of its microbatches, for schedules without a flush.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        blocks: str,
        schedule: pipeline.Schedule,
        positions: Positions,
        *,
        costs: list[float] | None = None,
        split_backward: bool = True,
    ) -> None:
        """Cuts the model in place and removes the stages of other ranks.

        Args:
            model: The whole model.
            mesh: The ranks.
            blocks: Name of the list of blocks to cut.
            schedule: A schedule for any number of microbatches; its name builds the others.
            positions: Receives the samples of each microbatch.
            costs: Cost of each block; None: all blocks cost the same.
            split_backward: Whether gradients of inputs may be computed before those of weights.

        Raises:
            UsageError: There are fewer blocks than stages, or the list does not exist.
        """
        local = schedule.stages_of(mesh.rank("pp"))
        self.cut = pipeline.cut(model, blocks, schedule.num_stages, local, costs=costs)
        self._own = {stage: self.cut.own(stage) for stage in self.cut.local_stages}
        self.reducer: Reducer | None = None
        self.updates: Updates | None = None
        self._mesh, self._positions = mesh, positions
        self._firsts: list[tuple[int, int]] = []  # by microbatch: first sample, number of samples
        self._runtime = pipeline.PipelineRuntime(
            self.cut,
            schedule.name,
            mesh.comm("pp"),
            on_microbatch=self._move,
            on_last_backward=None if schedule.updates else self._expect,
            on_weight_grad_ready=None if schedule.updates else self._complete,
            update=self._update if schedule.updates else None,
            split_backward=split_backward,
        )

    @property
    def groups(self) -> list[set[str]]:
        """Names of parameters whose gradients complete together: one stage's, or shared ones."""
        return [*self._own.values(), set(self.cut.shared)]

    def run(self, parts: list[tuple[Any, Any]], loss: Any, first_sample: int, train: bool) -> Any:
        """Passes microbatches through all stages.

        Args:
            parts: Inputs and targets of each microbatch, identical on all ranks of the pipeline.
            loss: Returns a sum and a count.
            first_sample: Place of the first sample in the batch of all replicas.
            train: Whether to run backward too.

        Returns:
            The runtime's result; every rank has the sum and the count.
        """
        self._firsts = []
        for x, _ in parts:
            self._firsts.append((first_sample, num_samples(x)))
            first_sample += num_samples(x)
        run = self._runtime.step if train else self._runtime.evaluate
        result = run([x for x, _ in parts], [y for _, y in parts], loss_fn=loss)
        for moment in result.moments:
            name, track = str(moment.action), "bubble" if moment.waited else "compute"
            self._mesh.ledger.span(name, track, moment.start_ns, moment.end_ns)
        entry = self._mesh.ledger.of("pp", "send")
        entry.calls += 1
        entry.nbytes += result.sent_bytes
        return result

    def _expect(self, stage: int) -> None:
        if self.reducer is not None:
            self.reducer.expect(self._own[stage])

    def _complete(self, stage: int) -> None:
        if self.reducer is not None:
            self.reducer.complete(self._own[stage])

    def _update(self, stage: int, microbatch: int) -> None:
        if self.updates is not None:
            self.updates.reduce(self._own[stage])
            self.updates.step()

    def _move(self, microbatch: int) -> None:
        first, count = self._firsts[microbatch]
        self._positions.move(first_sample=first, num_samples=count)


__all__ = ["Pipeline"]
