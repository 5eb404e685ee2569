"""Ranks with a group whose tensors are on a device, forked off the test that has torch loaded."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_emulated

import pycoll

sys.path.append(str(Path(__file__).resolve().parents[1] / "torch"))

from torch_ranks import init, same

__all__ = ["run_group", "run_in_turn", "same"]


def run_group(
    kind: str, fn: Callable[..., Any], n: int, *args: Any, timeout_s: float = 60, **options: Any
) -> list[Any]:
    """Calls fn(device, *args) on n ranks, each a process with a group and a device."""

    def work(comm: pycoll.Communicator, folder: str) -> Any:
        rank = comm.rank
        comm.close()
        if kind == torch_emulated.NAME:
            torch_emulated.install()
        device = torch.device(kind, rank % torch.get_device_module(kind).device_count())
        torch.get_device_module(kind).set_device(device)
        init(rank, n, Path(folder) / "store", timeout_s)
        try:
            return fn(device, *args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        return pycoll.run_ranks(work, n, folder, **options)


def run_in_turn(kind: str, n: int, *works: Callable[[torch.device], None]) -> None:
    """Calls each of these with the device, on n ranks of one group."""

    def work(device: torch.device) -> None:
        for each in works:
            each(device)
            dist.barrier()

    run_group(kind, work, n)
