"""Ranks that run a script with `pc.elastic`: those that end are started again."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping

from pycoll.launch.processes import World
from pycoll.launch.script import Launch

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


class ElasticLaunch(Launch):
    """A launch whose ranks may end: the others go on, and a new process takes the rank's place.

    The training has ended when a rank ends with status 0, or fewer than `least` ranks are left.
    """

    def __init__(
        self,
        argv: list[str],
        world: World,
        extra: dict[str, str],
        prefix: bool,
        grace_s: float,
        *,
        least: int,
        restarts: int,
    ) -> None:
        super().__init__(argv, world, extra, prefix, grace_s)
        self._least, self._restarts = least, restarts
        self._waiting: list[tuple[float, int]] = []  # when a rank starts again
        self._num_restarts = [0] * world.size
        self._has_ended = False

    def _environment(self, rank: int) -> Mapping[str, str]:
        join = {"PYCOLL_JOIN": "1"} if self._num_restarts[rank] else {}
        return {**super()._environment(rank), **join}

    def _when_ended(self, rank: int, status: int) -> None:
        if status == 0 or self._has_ended:
            self._end_soon()
        elif self._running < self._least:
            super()._when_ended(rank, status)
            self._has_ended = True
        elif sum(self._num_restarts) == self._restarts:
            self._say_how(rank, status, f"; all {self._restarts} restarts are used up")
        else:
            wait_s = min(_FIRST_WAIT_S * 2 ** self._num_restarts[rank], _LONGEST_WAIT_S)
            self._num_restarts[rank] += 1
            number = f"{sum(self._num_restarts)} of {self._restarts}"
            self._say_how(rank, status, f"; starting it again in {wait_s:g} s ({number})")
            heapq.heappush(self._waiting, (time.monotonic() + wait_s, rank))
            self._due_s = self._waiting[0][0]

    def _end_soon(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._due_s = time.monotonic() + self._grace_s

    def _when_due(self) -> bool:
        if self._has_ended:  # the ranks that are left came too late to train
            return True
        _, rank = heapq.heappop(self._waiting)
        self._start(rank)
        self._due_s = self._waiting[0][0] if self._waiting else None
        return False


__all__ = ["ElasticLaunch"]
