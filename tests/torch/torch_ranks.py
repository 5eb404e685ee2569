"""Ranks with a process group of the backend, forked off the test that has torch loaded."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycoll


def run_group(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 30,
    return_errors: bool = False,
) -> list[Any]:
    """Calls fn(rank, n, *args) on n ranks whose default process group is of pycoll."""
    with tempfile.TemporaryDirectory() as folder:

        def work(comm: pycoll.Communicator) -> Any:
            comm.close()
            init(comm.rank, n, Path(folder) / "store", timeout_s)
            try:
                return fn(comm.rank, n, *args)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

        return pycoll.run_ranks(work, n, return_errors=return_errors)


def init(rank: int, n: int, path: Path, timeout_s: float = 30, **kwargs: Any) -> None:
    """What a user's script does."""
    dist.init_process_group(
        "pycoll",
        store=dist.FileStore(str(path), n),
        rank=rank,
        world_size=n,
        timeout=datetime.timedelta(seconds=timeout_s),
        **kwargs,
    )


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaN like NaN; shapes too."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    wide = torch.float32 if got.is_floating_point() and got.element_size() == 1 else got.dtype
    a, b = got.to(wide), expected.to(wide)
    assert torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), (
        got,
        expected,
    )
