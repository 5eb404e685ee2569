"""The result of a pipeline step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.parallel.pipeline.step import Moment


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, and its costs on this rank.

    Attributes:
        loss_sum: Sum over all microbatches, equal on every rank.
        count: Number of items that the loss counted, equal on every rank.
        outputs: Outputs of the model by microbatch; on the last stage, and only without a loss.
        moments: Actions of this rank with their times.
        peak_live: The most microbatches that this rank held, in chunks of one stage.
        sent_bytes: Bytes of activations and gradients that this rank sent.
        staleness: Updates between forward and backward, by stage and microbatch, for schedules
            that update.
    """

    loss_sum: float
    count: float
    outputs: dict[int, Any]
    moments: list[Moment]
    peak_live: int
    sent_bytes: int
    staleness: dict[tuple[int, int], int]

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.loss_sum / self.count if self.count else 0.0

    @property
    def busy_s(self) -> float:
        """The time in which this rank computed."""
        return sum(m.end_ns - m.start_ns for m in self.moments if not m.waited) / 1e9

    @property
    def time_s(self) -> float:
        """Time from the first action to the end of the last one on this rank."""
        if not self.moments:
            return 0.0
        return (self.moments[-1].end_ns - self.moments[0].start_ns) / 1e9


__all__ = ["StepResult"]
