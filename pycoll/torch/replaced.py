"""Functions of torch that know Gloo by its name, made to know pycoll too.

torch refuses them for any other backend before it asks the backend, which has what they need. For
every group that is not pycoll's they are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Puts them into torch.distributed, once."""
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
    """Ours for a group of pycoll's that this rank is in, else torch's."""

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
    """Waits for all ranks; an error names those that do not come. The group stays good.

    Args:
        group: whose ranks are waited for; None: all.
        timeout: how long; a number is in seconds; None: the group's.
        wait_all_ranks: whether rank 0 names everyone who is missing, or the first.

    Raises:
        DistBackendError: on rank 0, naming the missing ranks; on the others, with rank 0's words.

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
