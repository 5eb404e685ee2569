"""What a step of training computed."""

from __future__ import annotations

from dataclasses import dataclass


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
        updates: How often `model.step` stepped the optimizer; 0 where the schedule has a flush.
        staleness: Of these, the most that came between a forward and its backward in the stage of
            this rank.
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
    updates: int = 0
    staleness: int = 0


__all__ = ["StepResult"]
