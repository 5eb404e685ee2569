"""Ranks that are threads of this process."""

from __future__ import annotations

from pycoll import _core
from pycoll.communicator import Communicator


def local_communicators(n: int, timeout_s: float = 60.0) -> list[Communicator]:
    """Makes communicators for `n` ranks that are threads of this process, one for each thread.

    Args:
        n: Number of ranks.
        timeout_s: Timeout of every operation, in seconds.

    Returns:
        The ranks' communicators in rank order.

    Raises:
        UsageError: `n` is not in 1..256.
    """
    world = _core.make_local_world(n)
    return [Communicator(_core.init_local(world, rank, float(timeout_s))) for rank in range(n)]


__all__ = ["local_communicators"]
