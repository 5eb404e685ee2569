"""A rank that comes to pycoll.init later than the others."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pycoll


@contextlib.contextmanager
def joins_late(
    rank: int, time_s: float, before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within, this rank of run_ranks, if it is a process, calls `before` and sleeps, then joins."""
    join = pycoll.init

    def late(**options: Any) -> pycoll.Communicator:
        if int(os.environ["RANK"]) == rank:
            before()
            time.sleep(time_s)
        return join(**options)

    with mock.patch.object(pycoll, "init", late):
        yield
