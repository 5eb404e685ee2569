"""pycoll as a backend of torch.distributed: `dist.init_process_group("pycoll")`.

Importing this registers the backend, and builds its extension module for the installed torch if
necessary. Scripts need not import it: torch finds the backend by itself (_pycoll_torch.py).
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

import _pycoll_torch
from pycoll import _core
from pycoll.observe import flight, stacks
from pycoll.torch import replaced, shim
from pycoll.torch.replaced import monitored_barrier
from pycoll.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["Options", "SyncBatchNorm", "monitored_barrier", "set_timeout"]

_pycoll_torch.register()
replaced.install()
Options = shim.load().Options


def make_backend(
    given: dist._DistributedBackendOptions,  # type: ignore[name-defined]
    options: object | None,
) -> dist.Backend:
    """Makes a group's backend; called by torch.

    Args:
        given: Store, ranks and timeout of the group.
        options: An `Options`, or None.

    Raises:
        DistBackendError: A rank did not join before the deadline.
        ValueError: The ranks cannot share one communicator, or `options` is not an `Options`.
    """
    if options is not None and not isinstance(options, Options):
        raise ValueError(
            f"pg_options is a {type(options).__name__}, expected a pycoll.torch.Options"
        )
    if not torch.backends.cuda.is_built():
        # With this setting, DDP allocates its buckets through the backend. pycoll does not change
        # it where NCCL groups may exist, too.
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    timeout_s = given.timeout.total_seconds()
    backend = shim.load().make_backend(
        given.store,
        given.group_rank,
        given.group_size,
        timeout_s,
        str(given.group_id),
        list(given.global_ranks_in_group),
        options,
    )
    records = _core.GroupRecords(backend._handle, f"torch group {given.group_id}")
    if (writer := stacks.install()) is not None:
        records._set_stack_writer(writer.signum, writer.fd)
    flight.watch_group(records)
    return backend


def set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Sets the timeout of a group's later operations, on every supported version of torch.

    Args:
        timeout: Longest time of an operation.
        group: The process group; None: the default one.
    """
    group = group or dist.group.WORLD
    assert group is not None
    served = {device.type: group._get_backend(device) for device in group._device_types}
    backend: Any = next((b for b in served.values() if b.name() == "pycoll"), None)
    if backend is None:
        raise ValueError("set_timeout: none of the group's backends is pycoll")
    (getattr(backend, "set_timeout", None) or backend._set_default_timeout)(timeout)
