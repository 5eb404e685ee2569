"""Ranks with a process group, forked off the process that has torch loaded.

`on_ranks` makes a test of a function that every rank runs. Its processes are forked once for the
whole run; each test gets a process group of its own. A test whose ranks die uses `run_group`.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Here once, not in every rank that makes a DistributedDataParallel: it takes seconds.
import torch._dynamo
import torch.distributed as dist

import pycoll
from pycoll.launch.processes import RankProcess, end_all

# "gloo" compares: a test that holds for torch's own backend tests the test.
BACKEND = os.environ.get("PYCOLL_TEST_BACKEND", "pycoll")
GRACE_S = 3.0  # after the first failure, for the other ranks to report theirs

# What ranks run, by "module.function". Forked ranks find it here, since a pipe carries only names.
_bodies: dict[str, Callable[..., None]] = {}


def beyond_gloo(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(BACKEND == "gloo", reason=reason)


def on_ranks(*sizes: int, timeout_s: float = 30, group: bool = True) -> Callable[..., Any]:
    """A test whose function every rank runs as fn(rank, n, ...), once for each number of ranks.

    Args:
        sizes: Numbers of ranks.
        timeout_s: The timeout of the process group.
        group: Whether there is a process group.

    Parameters behind `rank` and `n` are fixtures and parameters of the test, sent to the ranks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        key = f"{body.__module__}.{body.__qualname__}"
        _bodies[key] = body

        @functools.wraps(body)
        def test(ranks: Ranks, **given: Any) -> None:
            for n in sizes:
                ranks.run(key, n, timeout_s if group else None, given)

        names = ["ranks", *list(inspect.signature(body).parameters)[2:]]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


class Ranks:
    """Processes that run tests as ranks; started when a test needs them, ended by a failure."""

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []
        self.pipes: list[multiprocessing.connection.Connection] = []

    def run(self, key: str, n: int, timeout_s: float | None, given: dict[str, Any]) -> None:
        """Raises AssertionError with what every rank that failed says, the first one first."""
        while len(self.pipes) < n:
            self._start()
        try:
            with tempfile.TemporaryDirectory() as folder:
                for rank, pipe in enumerate(self.pipes[:n]):
                    pipe.send((key, rank, n, timeout_s, f"{folder}/store", given))
                failures = self._failures(n)
        except BaseException:
            self.close()
            raise
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))

    def close(self) -> None:
        end_all(self.processes, grace_s=0)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.pipes.append(ours)
        RankProcess.start(len(self.processes), lambda: _serve(theirs), into=self.processes)
        theirs.close()

    def _failures(self, n: int) -> list[str]:
        running = {pipe: rank for rank, pipe in enumerate(self.pipes[:n])}
        failures: list[str] = []
        deadline = None
        while running:
            patience_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = multiprocessing.connection.wait(list(running), patience_s)
            if not ended:
                break
            for pipe in ended:
                rank = running.pop(pipe)
                try:
                    text = pipe.recv()
                except (EOFError, ConnectionResetError):
                    text = "the process ended"
                if text:
                    failures.append(f"rank {rank} of {n}: {text}")
                    deadline = deadline or time.monotonic() + GRACE_S
        left = [f"rank {rank} of {n}: still runs" for rank in running.values()]
        return [*failures, *left]


def _serve(pipe: multiprocessing.connection.Connection) -> int:
    """Runs in a rank: one test after the other."""
    torch.set_num_threads(1)
    while True:
        try:
            key, rank, n, timeout_s, path, given = pipe.recv()
        except EOFError:
            return 0
        text = ""
        # A group that could not be made leaves torch's count of groups increased.
        dist.distributed_c10d._world.group_count = 0
        try:
            if timeout_s is None:
                _bodies[key](rank, n, **given)
            else:
                with_group(_bodies[key], rank, n, Path(path), timeout_s, given=given)
        except BaseException:
            text = traceback.format_exc()
        pipe.send(text)


def with_group(
    fn: Callable[..., Any], rank: int, n: int, path: Path, timeout_s: float, *args: Any, given: dict
) -> Any:
    """Calls fn(rank, n, ...) with a default process group of the backend under test."""
    torch.manual_seed(0)
    dist.set_debug_level_from_env()  # of a test; torch read it when it was loaded
    init(rank, n, path, timeout_s)
    try:
        return fn(rank, n, *args, **given)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_group(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 30,
    return_errors: bool = False,
) -> list[Any]:
    """Calls fn(rank, n, *args) on n fresh ranks with a process group: what they return.

    Nothing here may run a backward pass in this process: autograd's threads do not survive a fork.
    """
    if BACKEND == "pycoll":
        importlib.import_module("pycoll.torch")
    with tempfile.TemporaryDirectory() as folder:

        def work(comm: pycoll.Communicator) -> Any:
            rank = comm.rank
            comm.close()  # only its numbers are of use
            return with_group(fn, rank, n, Path(folder) / "store", timeout_s, *args, given={})

        return pycoll.run_ranks(work, n, return_errors=return_errors)


def init(rank: int, n: int, path: Path, timeout_s: float = 30, **kwargs: Any) -> None:
    """Makes the default process group, as a user's script does."""
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(str(path), n),
        rank=rank,
        world_size=n,
        timeout=datetime.timedelta(seconds=timeout_s),
        **kwargs,
    )


def finish(work: dist.Work | None) -> None:
    """Waits for an operation; None: one that was not asynchronous."""
    if work is not None:
        work.wait()


def note(name: str) -> None:
    """Lets the ranks go on that wait for the name."""
    dist.distributed_c10d._get_default_store().set(name, "")


def wait_for_note(name: str) -> None:
    """Stays away from the group until another rank calls note(name)."""
    dist.distributed_c10d._get_default_store().get(name)


def cpu_backend(group: dist.ProcessGroup | None = None) -> dist.Backend:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaN like NaN; shapes too."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    wide = torch.float32 if got.is_floating_point() and got.element_size() == 1 else got.dtype
    a, b = got.to(wide), expected.to(wide)
    equal = torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    assert equal, (got, expected)
