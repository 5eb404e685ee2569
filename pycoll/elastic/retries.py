"""When a rank tries again to reach a peer's port."""

from __future__ import annotations

from collections.abc import Iterator

ATTEMPT_S = 1.0
# A process that was killed keeps its port open until the kernel has freed its memory.
_FIRST_WAIT_S, _LAST_WAIT_S = 0.01, 0.2


def waits_between_attempts_s() -> Iterator[float]:
    """Seconds between attempts: they double, up to a limit."""
    wait_s = _FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _LAST_WAIT_S)


__all__ = ["ATTEMPT_S", "waits_between_attempts_s"]
