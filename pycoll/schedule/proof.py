"""Result of the verification of a schedule; see csrc/schedule/verify.h."""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.errors import UsageError

__all__ = ["Proof", "ScheduleError"]


class ScheduleError(UsageError):
    """A schedule was not proved to reach its collective's goal."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that the goal is reached, in the same order on all ranks, without a deadlock.

    Args:
        slots: assumed slots of each link.
        num_steps: steps of the longest program of a rank.
        order: bracketing of every requested reduction: `flat`, one step combines the start values
            of ranks 0, 1, 2, ...; `left_fold`, ((r0 + r1) + r2) + ... in several steps; or `other`.
            Without reductions it is `flat`.
    """

    slots: int
    num_steps: int
    order: str
