"""The pipeline of a parallelized model: its stages here, and the runtime that steps them."""

from __future__ import annotations

from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.batches import num_samples
from pycoll.parallel.data.reducer import Reducer
from pycoll.parallel.dropout import Positions
from pycoll.parallel.mesh import Mesh


class Pipeline:
    """This rank's stages of a model.

    Attributes:
        cut: What is where.
        reducer: Told when a stage's gradients are complete, so that it reduces them over the
            replicas while other stages compute.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        blocks: str,
        schedule: str,
        positions: Positions,
        *,
        costs: list[float] | None = None,
        split_backward: bool = True,
    ) -> None:
        """Cuts the model in place: what is not here, is removed from it.

        Args:
            model: Whole.
            mesh: The ranks.
            blocks: Name of the list that is cut.
            schedule: Its name.
            positions: Told which samples each microbatch has.
            costs: Of the blocks; None: alike.
            split_backward: Whether the gradients of inputs may be made before those of weights.

        Raises:
            UsageError: There are fewer blocks than stages, no such schedule or list, or the
                schedule updates weights within a step.
        """
        size = mesh.size("pp")
        made = pipeline.build(schedule, size, size, pipeline.generator(schedule).default_stages)
        if made.updates:
            raise UsageError(
                f"parallelize: schedule {schedule!r} updates weights within a step, and then no "
                "mesh equals one process: use pipeline.PipelineRuntime(..., update=) for it"
            )
        self.cut = pipeline.cut(
            model, blocks, made.num_stages, made.stages_of(mesh.rank("pp")), costs=costs
        )
        self._own = {stage: self.cut.own(stage) for stage in self.cut.local_stages}
        self.reducer: Reducer | None = None
        self._mesh, self._positions = mesh, positions
        self._firsts: list[tuple[int, int]] = []  # of each microbatch: first sample, and how many
        self._runtime = pipeline.PipelineRuntime(
            self.cut,
            schedule,
            mesh.comm("pp"),
            on_microbatch=self._move,
            on_last_backward=self._expect,
            on_weight_grad_ready=self._complete,
            split_backward=split_backward,
        )

    @property
    def groups(self) -> list[set[str]]:
        """Names of parameters whose gradients are complete at once: of a stage; of several."""
        return [*self._own.values(), set(self.cut.shared)]

    def run(self, parts: list[tuple[Any, Any]], loss: Any, first_sample: int, train: bool) -> Any:
        """Passes microbatches through all stages.

        Args:
            parts: Inputs and targets of each, alike on all ranks of the pipeline.
            loss: Returns a sum and a count.
            first_sample: Place of the first in the batch of all replicas.
            train: Backward, too.

        Returns:
            The runtime's result; the sum and the count are known on every rank.
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

    def _move(self, microbatch: int) -> None:
        first, count = self._firsts[microbatch]
        self._positions.move(first_sample=first, num_samples=count)


__all__ = ["Pipeline"]
