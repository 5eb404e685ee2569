"""Ranks as processes of their own, some of which may be killed; and processes beside them."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pycoll
from pycoll.launch.processes import World


@dataclass
class Process:
    pid: int
    pipe: int


def start(fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 20) -> list[Process]:
    """`fn(comm, *args)` on that many ranks; with size 0, `fn(*args)` in one process beside them."""
    world = World(max(size, 1))
    processes = []
    for rank in range(max(size, 1)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read)
                os.environ.pop("PYCOLL_TOKEN", None)
                if size:
                    os.environ.update(world.environment(rank))
                    os.environ.pop("PYCOLL_TOKEN")  # as newcomers, who know it from no launcher
                    outcome = fn(pycoll.init(timeout_s=timeout_s), *args)
                else:
                    outcome = fn(*args)
                status = 0
            except BaseException:
                outcome = traceback.format_exc()
            with os.fdopen(write, "wb") as pipe:
                pickle.dump((status, outcome), pipe)
            os._exit(0)
        os.close(write)
        processes.append(Process(pid, read))
    world.close()
    return processes


def end(processes: list[Process]) -> list[Any]:
    """What each returned, or how it was killed; fails with the traceback of one that raised."""
    outcomes: list[Any] = []
    failures = []
    for process in processes:
        with os.fdopen(process.pipe, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(process.pid, 0)
        if os.WIFSIGNALED(status):
            outcomes.append(f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
        elif not data:
            outcomes.append(None)  # it went by os._exit
        else:
            failed, outcome = pickle.loads(data)
            failures += [outcome] if failed else []
            outcomes.append(outcome)
    assert not failures, "\n".join(failures)
    return outcomes
