"""Starts ranks that use devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pycoll


def run_ranks(
    work: Callable[..., Any], n: int, *args: Any, threads: bool = False, **options: Any
) -> list[Any]:
    """As pycoll.run_ranks, but ranks that are threads run in a process of their own.

    Later tests fork ranks, and a process that was forked from one that has used a device cannot use
    it.
    """
    if not threads:
        return pycoll.run_ranks(work, n, *args, **options)

    def all_threads(_: pycoll.Communicator) -> list[Any]:
        return pycoll.run_ranks(work, n, *args, threads=True, **options)

    return pycoll.run_ranks(all_threads, 1)[0]
