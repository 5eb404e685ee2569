"""Calls on plain arrays try several plans: on all ranks the same, and with the same bytes."""

from __future__ import annotations

import os

import numpy as np
import pytest

import pycoll
from pycoll import run_ranks

pytestmark = pytest.mark.ranks

needs_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="ranks that share a core try nothing"
)
CALLS = 120  # some trials of each plan, as they come sooner at the start
COUNT = 48 * 1024  # of f32 in a payload: 192 KiB, where ranks that share cores try all_to_alls, too


def blocks(comm: pycoll.Communicator, name: str, call: int) -> tuple[list, np.ndarray | None]:
    """Arguments of a call whose values depend on its number, and the wanted output."""
    n, rank = comm.size, comm.rank
    part = COUNT // n
    base = np.arange(COUNT, dtype=np.float32) % 101 + call
    total = base * n + sum(range(n))
    mine = slice(rank * part, (rank + 1) * part)
    match name:
        case "all_reduce":
            return [base + rank, "sum"], total
        case "reduce_scatter":
            return [(base + rank).reshape(n, part), "sum"], total[mine]
        case "all_gather":
            return [base[mine].copy()], base.reshape(n, part)
        case "all_to_all":
            wanted = np.stack([base[mine] + peer for peer in range(n)])
            return [(base + rank).reshape(n, part)], wanted
        case "broadcast":
            return [base if rank == 0 else np.zeros_like(base), 0], base
        case "reduce":
            return [base + rank, 0, "sum"], total if rank == 0 else None
        case "scatter":
            return [base.reshape(n, part), 0], base[mine]
        case "gather":
            return [base[mine].copy(), 0], base if rank == 0 else None
    raise AssertionError(name)


def tuned(comm: pycoll.Communicator, names: list[str]) -> tuple[list[str], list[list[str]]]:
    """What was wrong, and the algorithm of each call. Calls of different collectives alternate, and
    in one of eight the arrays of a rank are registered ones."""
    comm.register_after = 0
    wrong, ran = [], []
    for call in range(CALLS):
        row = []
        for name in names:
            arguments, wanted = blocks(comm, name, call)
            if call % 8 == 7 and (call % 16 == 7 or comm.rank == 0):
                registered = comm.empty(arguments[0].shape, np.float32)
                registered[:] = arguments[0]
                arguments[0] = registered
            out = getattr(comm, name)(*arguments)
            if wanted is not None and not np.array_equal(np.ravel(out), np.ravel(wanted)):
                wrong.append(f"{name}, call {call}")
            row.append(comm.flight_record()[-1]["algorithm"])
        ran.append(row)
    return wrong, ran


@pytest.mark.parametrize("size", [2, 3])
def test_all_plans_give_the_same_bytes(size):
    """Some 2 s: eight collectives, 120 calls each."""
    crowded = size > len(os.sched_getaffinity(0))
    names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    names += ["broadcast", "reduce", "scatter", "gather"]
    if crowded:
        names = ["all_to_all"]  # the only one that tries others then
    results = run_ranks(tuned, size, names)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert all(ran == results[0][1] for _, ran in results), "ranks ran different plans"
    # Others than all_reduce have one plan where processes may not read each other's memory.
    assert crowded or len({row[0] for row in results[0][1]}) > 1, "all_reduce has tried nothing"


def explained(comm: pycoll.Communicator, nbytes: int) -> tuple[str, str]:
    comm.register_after = 0
    before = comm.explain("all_gather", nbytes)
    x = np.ones(nbytes // 4 // comm.size, np.float32)
    for _ in range(CALLS):
        comm.all_gather(x)
    return before, comm.explain("all_gather", nbytes)


@needs_cores
def test_explain_shows_what_calls_have_measured():
    (before, after), (_, other) = run_ranks(explained, 2, 256 << 10)
    assert "calls try these plans in turn" in before and "not yet" in before
    assert "by the kernel's copies" in before and "through slots" in before
    assert " us/MiB" in after
    tried = [line for line in after.splitlines() if line.endswith(" us/MiB")]
    assert tried == [line for line in other.splitlines() if line.endswith(" us/MiB")]


def broadcasts(comm: pycoll.Communicator) -> str:
    comm.register_after = 0
    for call in range(4 * CALLS):
        x = np.full(64 << 10, call if comm.rank == 0 else -1, np.float32)
        assert (comm.broadcast(x, 0) == call).all()
    return comm.explain("broadcast", x.nbytes)


@needs_cores
def test_broadcasts_try_few_slots():
    """A plan that has been measured has run, and each call is compared."""
    (text, _) = run_ranks(broadcasts, 2)
    few = [line for line in text.splitlines() if "through few slots" in line]
    assert len(few) == 1 and few[0].endswith(" us/MiB"), text


def tries(comm: pycoll.Communicator) -> list[bool]:
    asked = [("all_to_all", 64 << 10), ("all_to_all", 256 << 10), ("all_gather", 256 << 10)]
    return ["calls try these plans in turn" in comm.explain(*call) for call in asked]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) > 4, reason="takes more ranks than cores")
def test_ranks_that_share_cores_try_large_all_to_alls():
    n = len(os.sched_getaffinity(0)) + 1
    assert run_ranks(tries, n) == [[False, True, False]] * n


def test_nothing_is_tried_where_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("PYCOLL_ONLINE_TUNING", "0")
    (before, after), _ = run_ranks(explained, 2, 64 << 10)
    assert "calls try" not in before + after


def test_a_plan_that_the_system_does_not_allow_is_left(monkeypatch):
    monkeypatch.setenv("PYCOLL_PEER_MEMORY", "0")
    results = run_ranks(tuned, 2, ["all_gather", "all_reduce"])
    assert [wrong for wrong, _ in results] == [[]] * 2
    plain = [row[0] for call, row in enumerate(results[0][1]) if call % 8 != 7]
    assert {name.split("/")[1] for name in plain} == {"simple"}


def test_small_messages_are_not_tuned():
    for nbytes in (4, 8 << 10):
        (before, _), _ = run_ranks(explained, 2, nbytes)
        assert "calls try" not in before
