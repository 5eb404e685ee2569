"""Ranks with a process group: forked, so that none of them imports torch anew."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

# Here once, not in every rank that makes a DistributedDataParallel: it takes seconds.
import torch._dynamo
import torch.distributed as dist

import pycoll

# "gloo" compares: a test that holds for torch's own backend tests the test.
BACKEND = os.environ.get("PYCOLL_TEST_BACKEND", "pycoll")


def run_with_group(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    group_timeout_s: float = 30,
    return_errors: bool = False,
) -> list[Any]:
    """Calls `fn(*args)` on n ranks of a process group; what they return, in rank order.

    Nothing here may run a backward pass in this process: autograd's threads do not survive a fork.
    """
    if BACKEND == "pycoll":
        importlib.import_module("pycoll.torch")

    with tempfile.TemporaryDirectory() as folder:

        def work(comm: pycoll.Communicator) -> Any:
            rank, size = comm.rank, comm.size
            comm.close()  # only its numbers are of use
            torch.manual_seed(0)
            dist.set_debug_level_from_env()  # of a test; torch read it when it was loaded
            dist.init_process_group(
                BACKEND,
                store=dist.FileStore(f"{folder}/store", size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=group_timeout_s),
            )
            result = fn(*args)
            if dist.is_initialized():
                dist.destroy_process_group()
            return result

        return pycoll.run_ranks(work, n, return_errors=return_errors)
