"""Ranks whose calls differ: at once an error on every rank, naming both ranks and both calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from worlds import Comm, on_ranks, run

from pycoll import CollectiveMismatchError, UsageError
from pycoll.schedule import copy, reduce, register

pytestmark = pytest.mark.ranks

F32 = np.float32
Call = Callable[[Comm, int], object]

# The call of most ranks and the call of one rank, for k elements; and the error's text about each.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "count": ("all_reduce(ones(k))", "all_reduce(ones(k + 1))", "shape ({k},)", "shape ({more},)"),
    "empty": ("all_reduce(ones(k))", "all_reduce(ones(0))", "shape ({k},)", "shape (0,)"),
    "shape": (
        "all_reduce(ones((k, 2)))",
        "all_reduce(ones((2, k)))",
        "shape ({k}, 2)",
        "shape (2, {k})",
    ),
    "dtype": ("all_reduce(ones(k))", "all_reduce(ones(k, 'i4'))", "dtype f32", "dtype i32"),
    "op": ("all_reduce(ones(k), 'sum')", "all_reduce(ones(k), 'max')", "op sum", "op max"),
    "collective": (
        "all_reduce(ones(k))",
        "barrier()",
        "all_reduce(shape ({k},), dtype f32",
        "barrier()",
    ),
    "other_collective": (
        "all_reduce(ones(k))",
        "broadcast(ones(k), root=1)",
        "all_reduce(shape ({k},), dtype f32",
        "broadcast(shape ({k},), dtype f32, root 1",
    ),
    "root": ("broadcast(ones(k), root=0)", "broadcast(ones(k), root=1)", "root 0", "root 1"),
    "algorithm": (
        "all_reduce(ones(k), algorithm='ring')",
        "all_reduce(ones(k), algorithm='star')",
        "algorithm ring",
        "algorithm star",
    ),
    "protocol": (
        "all_reduce(ones(k), algorithm='ring/ll')",
        "all_reduce(ones(k), algorithm='ring/simple')",
        "algorithm ring/ll",
        "algorithm ring/simple",
    ),
}


def ones(shape: int | tuple[int, ...], dtype: str = "f4") -> np.ndarray:
    return np.ones(shape, dtype)


def barrier(comm: Comm, count: int) -> None:
    comm.barrier()


def make_mistakes(comm: Comm) -> dict[str, tuple[list[str], float]]:
    """Each mistake in a communicator of its own. Returns the messages, and how long they took."""
    found = {}
    for name, (right, wrong, _, _) in MISTAKES.items():
        for count, odd_one_out in [(3, 1), (40_000, comm.size - 1), (600_000, comm.size - 1)]:
            part = comm.split(0)
            part.all_reduce(np.ones(count, F32))  # all is well so far, and plans are made
            comm.barrier()
            start = time.monotonic()
            texts = []
            for call in (wrong if comm.rank == odd_one_out else right, "barrier()"):
                try:
                    eval(f"part.{call}", globals(), {"part": part, "k": count})
                except CollectiveMismatchError as error:
                    texts.append(str(error))
            took_s = time.monotonic() - start
            found[f"{name} {count} {odd_one_out}"] = (texts, took_s)
            part.close()
    comm.barrier()
    return found


def check_mistakes(outcomes: list[dict[str, tuple[list[str], float]]]) -> None:
    n = len(outcomes)
    for case in outcomes[0]:
        name, count, odd_one_out = case.split()
        right, wrong = (text.format(k=count, more=int(count) + 1) for text in MISTAKES[name][2:])
        num_at_once = 0
        for rank, outcome in enumerate(outcomes):
            texts, took_s = outcome[case]
            # In that call; or in the next, of a rank that waited for no other.
            assert texts, f"{case}: rank {rank} of {n} noticed nothing"
            num_at_once += len(texts) == 2
            for text in texts:
                for part in (f"rank {odd_one_out} called", right, wrong, "operation #2"):
                    assert part in text, (case, part, text)
            assert took_s < 10, f"{case}: rank {rank} took {took_s:.3f} s"
        # A root, and a rank with nothing to send, may raise later: they wait for no other rank.
        assert num_at_once >= (n if name not in ("root", "empty", "other_collective") else 1), case


def test_mismatch_raises_on_every_rank_and_names_both_calls():
    for n, kind in [(2, "processes"), (2, "threads"), (3, "threads"), (4, "processes")]:
        check_mistakes(run(make_mistakes, n, kind=kind))


@on_ranks(3)
def test_sequences_of_calls_that_differ_raise_on_every_rank(comm):
    calls: dict[str, Callable[[Comm], object]] = {
        "a": lambda part: part.all_reduce(np.ones(5)),
        "b": lambda part: part.barrier(),
        "c": lambda part: part.broadcast(np.ones(7)),
    }
    for odd, odd_calls, other_calls, texts in [
        (2, "ba", "ab", ["rank 2 called barrier()", "all_reduce(shape (5,), dtype f64, op sum)"]),
        (0, "aacb", "acb", ["operation #2"]),  # a call too many
        (1, "bcb", "bacb", ["as operation #2", "rank 1 called broadcast(shape (7,)"]),  # one less
    ]:
        part = comm.split(0)
        with pytest.raises(CollectiveMismatchError) as caught:
            for call in odd_calls if comm.rank == odd else other_calls:
                calls[call](part)
        assert all(text in str(caught.value) for text in texts), caught.value
        assert not isinstance(caught.value, UsageError)


# Calls from which some ranks may return before the other ranks have called.
LEAVE_EARLY: dict[str, Call] = {
    "empty": lambda comm, root: comm.all_reduce(np.ones(0, F32)),
    "broadcast": lambda comm, root: comm.broadcast(np.ones(3, F32), root=root),
    "reduce": lambda comm, root: comm.reduce(np.ones(3, F32), root=root),
    "gather": lambda comm, root: comm.gather(np.ones(3, F32), root=root),
    "scan": lambda comm, root: comm.scan(np.ones(3, F32)),
    "neighbor_exchange": lambda comm, root: comm.neighbor_exchange(np.ones((2, 3), F32)),
}


def mix_early_leavers(comm: Comm) -> dict[tuple[str, str, int, int], list[str]]:
    """Every two of them, with roots that let each return early, in a communicator of their own."""
    found = {}
    for first, call_first in LEAVE_EARLY.items():
        for second, call_second in LEAVE_EARLY.items():
            for odd in range(comm.size):
                roots = (odd, (odd + 1) % comm.size)
                if first == second and first not in ("broadcast", "reduce", "gather"):
                    continue
                for root_of_odd, root in (roots, roots[::-1]):
                    part = comm.split(0)
                    texts = []
                    is_odd = comm.rank == odd
                    for call in (call_first if is_odd else call_second, lambda c, _: c.barrier()):
                        try:
                            call(part, root_of_odd if is_odd else root)
                        except CollectiveMismatchError as error:
                            texts.append(str(error))
                    found[first, second, odd, root] = texts
                    part.close()
    return found


def test_mismatch_of_calls_that_do_not_wait_is_raised_in_the_next_call_at_the_latest():
    for n, kind in [(2, "processes"), (3, "threads")]:
        outcomes = run(mix_early_leavers, n, kind=kind)
        for case in outcomes[0]:
            for rank, outcome in enumerate(outcomes):
                assert outcome[case], f"{case}: rank {rank} of {n} noticed nothing"
                for text in outcome[case]:
                    assert "as operation #1, " in text, (case, text)
                    assert "test_mismatch.py:" in text, (case, text)


@on_ranks(3)
def test_calls_that_agree_raise_no_false_alarm(comm):
    """Early leavers run ahead of each other; sizes, roots and collectives change all the time."""
    calls = list(LEAVE_EARLY.values()) + [barrier]
    rng = np.random.default_rng(7)  # identical on all ranks
    for _ in range(1000):
        calls[rng.integers(len(calls))](comm, int(rng.integers(comm.size)))


@on_ranks(2)
def test_split_sizes_that_differ_name_both_ranks_and_places(comm):
    send, recv = {0: ([1, 2], [1, 3]), 1: ([3, 4], [5, 4])}[comm.rank]  # 0 sends 2, 1 expects 5
    with pytest.raises(CollectiveMismatchError) as caught:
        comm.all_to_all(np.ones(sum(send)), send_counts=send, recv_counts=recv)
    text = str(caught.value)
    assert "rank 0 of 2 sends 2 elements to rank 1, which expects 5" in text
    assert text.count("test_mismatch.py:") == 2


@on_ranks(processes=[2])
def test_schedules_of_one_name_that_differ_by_rank_are_named(comm):
    name = f"differs_{comm.size}"

    @register("all_reduce", name)
    def generate(n, root):
        yield reduce(0, 0, src=0, dst=1)
        if comm.rank == 0:  # each rank's schedule is right for itself
            yield copy(1, 0, src=1, dst=0)
        else:
            yield copy(1, 0, src=1, dst=0)
            yield copy(2, 0, src=1, dst=0)

    with pytest.raises(CollectiveMismatchError, match="schedules of that name differ"):
        comm.all_reduce(np.ones(3), algorithm=name)
