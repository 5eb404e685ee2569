"""The result of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.parallel.core.lateness import Late


@dataclass(slots=True)
class StepResult:
    """Result of a step; all numbers but the times are equal on every rank.

    Attributes:
        step: Number of the step, from 0.
        loss: Mean over all tokens of all replicas.
        tokens: Number of tokens that the loss counts.
        seconds: Duration of `model.step` on this rank.
        waited_s: Part of `seconds` in which this rank waited for collectives and messages.
        bubble_s: Part of `seconds` in which this rank's pipeline stage was idle.
        grad_norm: Norm of all gradients before clipping; set by the optimizer's step.
        unused: Names of this rank's parameters that no replica used.
        unused_now: Those of `unused` that were used in the step before, or all in the first step.
        rank: The rank of this process.
        updates: Number of optimizer steps within `model.step`; 0 for schedules with a flush.
        staleness: The most updates between a forward and its backward in this rank's stage.
        samples: Number of samples of all replicas.
        ranks: Number of ranks of the mesh.
        late: The rank that the others waited for longest; set by the optimizer's step.
        skipped: Whether a gradient was not finite, so that no rank has stepped.
        plain: Whether `loss.backward()` ran the step, so that its loss and tokens are not known:
            the loss is NaN, and a script may set it.
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
    samples: int = 0
    ranks: int = 1
    late: Late | None = None
    skipped: bool = False
    plain: bool = False


__all__ = ["StepResult"]
