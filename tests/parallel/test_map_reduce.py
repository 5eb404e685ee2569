"""map_reduce: the result of one process, to the bit, on any number of ranks."""

from __future__ import annotations

import collections
import functools
import threading

import numpy as np
import pytest
import torch

from pycoll import Error, UsageError, run_ranks
from pycoll import parallel as pc

SHARDS = [np.random.default_rng(i).normal(size=(5, 3)).astype(np.float32) for i in range(7)]
MERGE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def taken_in_turns(fn, n, count):
    """Calls `fn(i)`, after n ranks have a shard each, as long as there are n of them left."""
    barrier = threading.Barrier(n)

    def call(i):
        if i < count // n * n:
            barrier.wait(60)
        return fn(i)

    return call


def mean_and_extent(shard):
    """A number, an array and a tensor."""
    return {"sum": float(shard.sum()), "columns": (shard.sum(0), torch.from_numpy(shard[0] ** 2))}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_result_is_that_of_one_process(n, dynamic):
    sizes = (1, 2, len(SHARDS))

    def mapped(i):
        return mean_and_extent(SHARDS[i])

    functions = {k: taken_in_turns(mapped, n, k) if dynamic else mapped for k in sizes}

    def work(comm):
        options = {"comm": comm, "dynamic": dynamic}
        return {
            op: [pc.map_reduce(functions[k], range(k), op, **options) for k in sizes]
            for op in MERGE
        }

    for outcome in run_ranks(work, n, threads=True):
        for op, merge in MERGE.items():
            for count, found in zip((1, 2, len(SHARDS)), outcome[op], strict=True):
                each = [mean_and_extent(shard) for shard in SHARDS[:count]]
                assert found["sum"] == functools.reduce(merge, [m["sum"] for m in each])
                columns = functools.reduce(merge, [m["columns"][0] for m in each])
                assert np.array_equal(found["columns"][0], columns)
                squares = functools.reduce(merge, [m["columns"][1].numpy() for m in each])
                assert isinstance(found["columns"][1], torch.Tensor)
                assert np.array_equal(found["columns"][1].numpy(), squares)


def test_merging_in_any_order_is_near():
    def work(comm):
        given = np.ones(3)
        total = pc.map_reduce(lambda i: given * i, range(10), comm=comm, deterministic=False)
        fewer = pc.map_reduce(lambda i: i, range(2), comm=comm, deterministic=False)
        return total, fewer, given

    for total, fewer, given in run_ranks(work, 3, threads=True):
        assert np.array_equal(total, np.full(3, 45.0)) and fewer == 1
        assert np.array_equal(given, np.ones(3))


WORDS = ["a rose is", "a rose", "is a rose", "is", "a rose is a rose"]


def counts(line):
    """Words with their numbers, the line, and an array whose size depends on the line."""
    return {"words": dict(collections.Counter(line.split())), "text": [line], "all": np.arange(3)}


def joined(a, b):
    """Associative, and not commutative."""
    words = dict(collections.Counter(a["words"]) + collections.Counter(b["words"]))
    return {
        "words": words,
        "text": a["text"] + b["text"],
        "all": np.concatenate([a["all"], b["all"]]),
    }


def test_own_merge_keeps_the_order_of_shards():
    """In processes: dynamic shards, in the order of ranks, and as a tree."""
    ways = [{"dynamic": True}, {}, {"deterministic": False}, {"root": 1}, {"root": 2}]
    ways.append({"deterministic": False, "root": 1})

    def work(comm):
        return [
            pc.map_reduce(counts, WORDS[:count], joined, comm=comm, **way)
            for way in ways
            for count in (1, 2, len(WORDS))
        ]

    for rank, found in enumerate(run_ranks(work, 3)):
        for i, merged in enumerate(found):
            way, count = ways[i // 3], (1, 2, len(WORDS))[i % 3]
            if way.get("root", rank) != rank:
                assert merged is None
                continue
            expected = functools.reduce(joined, map(counts, WORDS[:count]))
            assert merged["words"] == expected["words"] and merged["text"] == expected["text"], way
            assert np.array_equal(merged["all"], expected["all"])


def test_concat_joins_results_of_different_lengths_in_the_order_of_shards():
    def results(i):
        return {"squares": np.arange(i) ** 2, "pairs": torch.full((i % 2, 2), i), "number": i / 2}

    in_turns = taken_in_turns(results, 3, 7)

    def work(comm):
        ways = [(results, {}), (in_turns, {"dynamic": True}), (results, {"root": 2})]
        return [pc.map_reduce(fn, range(7), "concat", comm=comm, **way) for fn, way in ways]

    each = [results(i) for i in range(7)]
    for rank, found in enumerate(run_ranks(work, 3, threads=True)):
        assert (found[2] is None) == (rank != 2)
        for merged in found if rank == 2 else found[:2]:
            assert np.array_equal(merged["squares"], np.concatenate([e["squares"] for e in each]))
            assert torch.equal(merged["pairs"], torch.cat([e["pairs"] for e in each]))
            assert merged["number"].tolist() == [i / 2 for i in range(7)]


@pytest.mark.parametrize("slow", [0, 2])
def test_dynamic_shards_leave_one_to_a_slow_rank(slow):
    """The slow rank's first shard takes as long as all shards of the other ranks."""
    all_but_one, mapped, lock = threading.Event(), [], threading.Lock()
    has_begun = threading.Event()

    def work(comm):
        def fn(i):
            if comm.rank == slow:
                has_begun.set()
                assert all_but_one.wait(60)
            else:
                assert has_begun.wait(60)
            with lock:
                mapped.append(comm.rank)
                if len(mapped) == 11:
                    all_but_one.set()
            return i

        return pc.map_reduce(fn, range(12), comm=comm, dynamic=True)

    assert run_ranks(work, 3, threads=True) == [66] * 3
    assert mapped.count(slow) == 1 and len(mapped) == 12


def test_tasks_are_called():
    def work(comm):
        tasks = [lambda: np.ones(2), lambda: np.full(2, 5.0), lambda: np.zeros(2)]
        return pc.map_reduce(None, tasks, comm=comm, dynamic=True, root=0)

    first, second = run_ranks(work, 2, threads=True)
    assert first.tolist() == [6, 6] and second is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_failed_shard_is_named_on_every_rank(dynamic):
    def work(comm):
        def fn(i):
            if i == 5:
                raise KeyError(f"no file on rank {comm.rank}")
            return i

        with pytest.raises((Error, KeyError)) as raised:
            pc.map_reduce(fn, range(9), comm=comm, dynamic=dynamic)
        total = pc.map_reduce(lambda i: i, range(9), comm=comm, dynamic=dynamic)  # all are in step
        return raised.type, str(raised.value), total

    found = run_ranks(work, 3, threads=True)
    failed = [rank for rank, (kind, _, _) in enumerate(found) if kind is KeyError]
    assert len(failed) == 1
    text = (
        f"map_reduce: shard 5 failed on rank {failed[0]}: KeyError('no file on rank {failed[0]}')"
    )
    assert [t for kind, t, _ in found if kind is Error] == [text] * 2
    assert [total for _, _, total in found] == [36] * 3


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="no shards"):
        pc.map_reduce(len, [])
    names = "sum, prod, min, max, concat, or a function of two"
    with pytest.raises(UsageError, match=f"op is 'mean', expected one of {names}"):
        pc.map_reduce(len, [[1]], "mean")
    with pytest.raises(UsageError, match="the function gave a str, expected an array"):
        pc.map_reduce(str, [1])
    with pytest.raises(UsageError, match="the function gave a Counter, expected arrays"):
        pc.map_reduce(collections.Counter, ["ab"], lambda a, b: a + b)
    with pytest.raises(UsageError, match="fn is None and a shard is a int, expected tasks"):
        pc.map_reduce(None, [1])
    with pytest.raises(UsageError, match="gave 1 arrays for one shard and 2 for another"):
        pc.map_reduce(lambda n: [1] * n, [1, 2])
    with pytest.raises(UsageError, match="root"):
        pc.map_reduce(len, [[1]], root=1)
