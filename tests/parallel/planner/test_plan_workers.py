"""Forked workers: their values, their errors, their ends, and plans that they trace for."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_gpt import GPT, PLAN

import pycoll
from pycoll import parallel as pc
from pycoll.parallel.planner import cost, workers
from pycoll.parallel.planner.workers import Workers, usable_workers

pytestmark = [pytest.mark.pure, pytest.mark.timeout(120)]

HERE = os.getpid()
CLUSTER = Path(__file__).resolve().parents[3] / "examples" / "topologies" / "a100_hosts.toml"


def where(key: int) -> tuple[int, int]:
    if key < 0:
        raise ValueError(f"no value of {key} in {'this process' if os.getpid() == HERE else 'it'}")
    return key, os.getpid()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_expected_values_are_computed_by_workers_and_others_here():
    keys = [*range(40), -1, *range(41, 60)]
    with Workers(where, 2) as some:
        some.expect(iter(keys))
        assert some.take(1000) == (1000, HERE)
        taken = [some.take(key) for key in range(40)]
        with pytest.raises(ValueError, match="no value of -1 in this process"):
            some.take(-1)
        taken += [some.take(key) for key in range(41, 60)]
        pids = {process.pid for process in some._processes}
    assert [key for key, _ in taken] == [key for key in keys if key >= 0]
    assert {pid for _, pid in taken} == pids and len(pids) == 2
    assert all(map(has_ended, pids))
    with Workers(where, 0) as none:
        none.expect(iter(keys))
        assert none.take(3) == (3, HERE)


def test_values_of_workers_that_were_killed_are_computed_here():
    def work(key: int) -> int:
        if os.getpid() != HERE and key % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return key**2

    with Workers(work, 2) as some:
        some.expect(range(10))
        assert [some.take(key) for key in range(10)] == [key**2 for key in range(10)]


def test_workers_end_with_an_interrupted_caller():
    with pytest.raises(KeyboardInterrupt), Workers(where, 2) as some:
        some.expect(range(10))
        pids = [process.pid for process in some._processes]
        signal.raise_signal(signal.SIGINT)
    assert len(pids) == 2 and all(map(has_ended, pids))


def test_processes_with_threads_communicators_or_devices_do_not_fork(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(workers, "open_communicators", list)
    assert usable_workers() == 3
    for owner, name, value in (
        (os, "sched_getaffinity", {0}),
        (threading, "active_count", 2),
        (torch.cuda, "device_count", 1),
        (workers, "open_communicators", [SimpleNamespace(size=2)]),
        (torch.distributed, "is_initialized", True),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, lambda *_, value=value: value)
            assert usable_workers() == 0, name


def forks(comm: pycoll.Communicator) -> int:
    return usable_workers()


def test_ranks_do_not_fork():
    assert pycoll.run_ranks(forks, 2) == [0, 0]


def test_plans_with_workers_equal_those_of_one_process(monkeypatch):
    """A second: two plans of few traces."""
    forked, fork = [], Workers._fork
    monkeypatch.setattr(Workers, "_fork", lambda self: forked.append(self) or fork(self))
    choices = pc.Choices(
        zero=(0,), recompute=(None,), sequence_parallel=(False,), axes=("dp", "tp", "cp"),
        largest_microbatch=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(vocab=64, dim=32, depth=4, heads=4, context=16, fused=True, drop=0)
    tokens = torch.zeros(4, 16, dtype=torch.int64, device="meta")
    plans = []
    for count in (0, 2):
        monkeypatch.setattr(cost, "usable_workers", lambda count=count: count)
        plans.append(pc.plan(model, tokens, world=2, cluster=CLUSTER, tp=PLAN, choices=choices))
        assert bool(forked) == bool(count)
    alone, together = plans
    assert (together.best, together.why, together.tried) == (alone.best, alone.why, alone.tried)
