"""Replacements of torch functions that accept only Gloo by name, so that they accept pycoll too.

torch refuses other backends by name, although pycoll supports these functions. For groups of other
backends, the replacements call torch's own functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Installs the replacements in torch.distributed, once."""
    functions: dict[str, Callable[..., Any]] = {
        "monitored_barrier": monitored_barrier,
        "_set_pg_timeout": _set_pg_timeout,
    }
    for name, ours in functions.items():
        torchs = getattr(distributed_c10d, name)
        if hasattr(torchs, "__wrapped__") and torchs.__module__ == __name__:
            continue
        chooser = _choose(torchs, ours)
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, chooser)


def _choose(torchs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Chooses `ours` for a pycoll group with this rank, else `torchs`."""

    @functools.wraps(torchs)
    def chooser(*args: Any, **kwargs: Any) -> Any:
        position = ours.__code__.co_varnames.index("group")
        group = kwargs.get("group", args[position] if len(args) > position else None)
        inside = dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER
        if inside and dist.get_rank(group) >= 0 and dist.get_backend(group) == "pycoll":
            return ours(*args, **kwargs)
        return torchs(*args, **kwargs)

    chooser.__module__ = __name__
    return chooser


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Waits for all ranks; an error names the missing ranks. The group stays usable.

    Args:
        group: process group; None: the default group.
        timeout: longest wait; a number is in seconds; None: the group's timeout.
        wait_all_ranks: whether rank 0 names all missing ranks, or only the first.

    Raises:
        DistBackendError: a rank is missing; all ranks get the text of rank 0, which names it.

    Cost: messages through the store: about a millisecond per rank.
    """
    group = group or dist.group.WORLD
    if isinstance(timeout, float):
        timeout = timedelta(seconds=timeout)
    limits = {} if timeout is None else {"timeout": timeout}
    group.monitored_barrier(wait_all_ranks=wait_all_ranks, **limits)  # type: ignore[union-attr]


def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    from pycoll.torch import set_timeout

    set_timeout(timeout, group)
