"""The ranks that are left after a failure, and what each of them was doing."""

from __future__ import annotations

from typing import Any

from pycoll.communicator import Communicator
from pycoll.errors import AbortedError, Error, PeerDiedError, TimeoutError
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.recovery.laps import Laps

LOST = (PeerDiedError, AbortedError, TimeoutError)  # what a call raises when another rank is gone
GOES_ON = "the training continues on other ranks"


class Regrouped(BaseException):
    """Leaves the user's loop, because the ranks that are left have found each other.

    Attributes:
        left: These ranks.
        laps: Times since the failure.
        news: What has happened.
        final: Why this rank cannot go on; None: it can.
    """

    def __init__(
        self, left: Communicator, laps: Laps, news: str, final: Error | None = None
    ) -> None:
        super().__init__(news)
        self.left, self.laps, self.news, self.final = left, laps, news, final


def survivors(
    base: Communicator, error: Error, doing: Any, *, needs_death: bool
) -> tuple[Communicator, list[Any]]:
    """The ranks that are left, and what each was doing when it failed. Collective.

    Every rank whose communicator has broken calls this, wherever in a step it was.

    Args:
        base: The broken communicator.
        error: What this rank has seen.
        doing: Of this rank, as JSON.
        needs_death: Without the death of a rank the error is raised.

    Raises:
        Error: `error`, if all ranks are left, unless some rank took another one for dead, or not
            `needs_death`: a rank was late, or gave up. That of `shrink`, in a minority.
    """
    goes_on = isinstance(error, PeerDiedError) or not needs_death
    while True:
        left = base.shrink()
        if left.size == base.size and not left.agree(goes_on, "max"):
            raise error
        try:
            return left, gather_objects(doing, left)
        except LOST as another:
            base, error = left, another
            goes_on = True


__all__ = ["GOES_ON", "LOST", "Regrouped", "survivors"]
