"""Where the time between a failure and the next step goes."""

from __future__ import annotations

import time


class Laps:
    """Seconds of the parts of a restart, one after the other.

    Attributes:
        began_s: When the first part began, on CLOCK_MONOTONIC.
        seconds: Seconds by part, in their order.
    """

    def __init__(self) -> None:
        """Begins the first part."""
        self.began_s = self._ended_s = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """Ends a part, and begins the next one."""
        before_s, self._ended_s = self._ended_s, time.monotonic()
        self.seconds[part] = self._ended_s - before_s

    def total_s(self) -> float:
        """Seconds of all parts that have ended."""
        return self._ended_s - self.began_s


__all__ = ["Laps"]
