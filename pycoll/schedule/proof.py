"""What verification of a schedule gives; see csrc/schedule/verify.h."""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.errors import UsageError

__all__ = ["Proof", "ScheduleError"]


class ScheduleError(UsageError):
    """A schedule was not proved to reach its collective's goal."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved: the goal is reached, in one order on all ranks, without a deadlock.

    Args:
        slots: of each link, as assumed.
        num_steps: of the longest program of a rank.
        order: how every reduction that somebody asks for is bracketed: `flat`, one step combines
            the start values of ranks 0, 1, 2, ...; `left_fold`, ((r0 + r1) + r2) + ... in several
            steps; or `other`. With nothing to reduce it is `flat`.
    """

    slots: int
    num_steps: int
    order: str
