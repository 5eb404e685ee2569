"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.parallel.pipeline.step import Moment


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives, and what it took here.

    Attributes:
        loss_sum: Of all microbatches, the same on every rank.
        count: Of what the loss has counted, the same on every rank.
        outputs: Of the model by microbatch, on the last stage, where there was no loss.
        moments: What this rank did when.
        peak_live: The most microbatches, in chunks of one stage, that it held.
        sent_bytes: Activations and gradients that it sent.
        staleness: Of a schedule that updates: updates between forward and backward, by stage and
            microbatch.
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
        """The mean."""
        return self.loss_sum / self.count if self.count else 0.0

    @property
    def busy_s(self) -> float:
        """The time in which this rank computed."""
        return sum(m.end_ns - m.start_ns for m in self.moments if not m.waited) / 1e9

    @property
    def time_s(self) -> float:
        """From the first action to the end of the last one, here."""
        if not self.moments:
            return 0.0
        return (self.moments[-1].end_ns - self.moments[0].start_ns) / 1e9


__all__ = ["StepResult"]
