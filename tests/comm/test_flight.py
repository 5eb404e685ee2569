"""Records of the last operations: contents, places of calls, the rank that is last."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest
from worlds import Comm, on_ranks

from pycoll import CollectiveMismatchError, TimeoutError, run_ranks
from pycoll.observe import flight

pytestmark = pytest.mark.ranks


def step(comm: Comm, x: np.ndarray) -> None:
    comm.all_reduce(x, "max")  # the line that a record names


STEP_SITE = f"{os.path.relpath(__file__)}:{step.__code__.co_firstlineno + 1} in step"


@on_ranks(2)
def test_record_holds_the_call_its_times_and_its_place(comm):
    before = time.monotonic_ns()
    step(comm, np.ones((3, 4), np.float32))
    comm.broadcast(np.ones(5, np.int64), root=1, algorithm="star")
    comm.barrier()
    records, after = comm.flight_record(all_ranks=True), time.monotonic_ns()
    own = [record for record in records if record["rank"] == 0]
    assert [record["sequence"] for record in own] == [1, 2, 3]
    assert [record["collective"] for record in own] == ["all_reduce", "broadcast", "barrier"]
    reduce, broadcast, barrier = own
    assert (reduce["dtype"], reduce["op"], reduce["shape"]) == ("f32", "max", (3, 4))
    assert (reduce["nbytes"], reduce["root"], reduce["asked"]) == (48, None, None)
    assert reduce["site"] == STEP_SITE
    assert "/" in reduce["algorithm"]
    assert (broadcast["op"], broadcast["root"], broadcast["asked"]) == (None, 1, "star")
    assert broadcast["algorithm"].startswith("star/")
    assert barrier["site"].endswith("in test_record_holds_the_call_its_times_and_its_place")
    for record in own if comm.rank == 0 else []:
        assert not record["failed"]
        assert before - 10_000 <= record["entered_ns"] <= record["finished_ns"] <= after + 10_000
    entered = [record["entered_ns"] for record in own]
    assert entered == sorted(entered)
    peers = [record for record in records if record["rank"] == 1]
    assert peers[0]["digest"] == reduce["digest"]


@on_ranks(threads=[2])
def test_ring_keeps_the_last_1024_operations(comm):
    for _ in range(1100):
        comm.all_reduce(np.ones(1))
    assert [record["sequence"] for record in comm.flight_record()] == list(range(77, 1101))


@on_ranks(2)
def test_many_places_in_the_code_are_distinguished(comm):
    """More places than the cache of places has room for, each called more than once."""
    code = "".join(f"def f{i}(comm, x): comm.all_reduce(x)\n" for i in range(200))
    names: dict = {}
    exec(compile(code, "places.py", "exec"), names)
    for _ in range(3):
        for i in range(200):
            names[f"f{i}"](comm, np.ones(1))
    sites = [record["site"] for record in comm.flight_record()]
    assert sites == [f"places.py:{i + 1} in f{i}" for i in range(200)] * 3


@on_ranks(2, timeout_s=0.3)
def test_timeout_says_what_the_late_rank_did_last(comm):
    step(comm, np.ones(3, np.float32))
    if comm.rank == 1:
        time.sleep(0.7)
        return
    with pytest.raises(TimeoutError) as caught:
        comm.all_reduce(np.ones(2))
    text = str(caught.value)
    assert "rank 1 has not entered it: it finished #1, all_reduce(shape (3,), dtype f32" in text
    assert f"at {STEP_SITE}, 0." in text
    assert "in all_reduce(shape (2,), dtype f64, op sum) at " in text


@on_ranks(2)
def test_mismatch_names_the_place_of_both_calls(comm):
    with pytest.raises(CollectiveMismatchError) as caught:
        if comm.rank == 0:
            step(comm, np.ones(3))
        else:
            comm.barrier()
    text = str(caught.value)
    assert f"op max) at {STEP_SITE}" in text
    assert f"barrier() at {os.path.relpath(__file__)}:" in text


@on_ranks(3)
def test_straggler_is_the_rank_that_is_last(comm):
    for _ in range(5):
        if comm.rank == 2:
            time.sleep(0.05)
        comm.all_reduce(np.ones(3))
    (row,) = comm.stragglers()
    assert row["collective"] == "all_reduce"
    assert row["operations"] == 5
    assert row["median_skew_us"] > 10_000
    assert row["last"][2] >= 4


def test_record_is_dumped_on_error_and_holds_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLL_FLIGHT_DIR", str(tmp_path))

    def work(comm: Comm) -> None:
        comm.barrier()
        comm.all_reduce(np.ones(3 + comm.rank))

    run_ranks(work, 2, return_errors=True, timeout_s=10)
    files = sorted(tmp_path.iterdir())
    assert [path.name.rpartition("-")[2] for path in files] == ["rank_0.json", "rank_1.json"]
    for rank, path in enumerate(files):
        found = json.loads(path.read_text())
        assert found["rank"] == rank
        assert found["pycoll"]["failure"]["kind"] == "mismatch"
        barrier, reduce = found["entries"]
        assert (barrier["state"], reduce["state"]) == ("completed", "started")
        assert reduce["pycoll"]["failed"]
        assert reduce["input_sizes"] == [[3 + rank]]
        assert reduce["frames"][0]["filename"] == os.path.relpath(__file__)
        assert [e["profiling_name"] for e in found["pycoll"]["peers"][str(1 - rank)]] == [
            "pycoll:barrier",
            "pycoll:all_reduce",
        ]


def test_record_is_dumped_on_a_signal_while_a_rank_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLL_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setenv("PYCOLL_DUMP_SIGNAL", "SIGUSR2")

    def work(comm: Comm) -> None:
        pids = np.zeros(2, np.int64)
        pids[comm.rank] = os.getpid()
        comm.all_reduce(pids)
        if comm.rank == 1:
            time.sleep(0.1)  # rank 0 waits
            os.kill(int(pids[0]), signal.SIGUSR2)
            deadline = time.monotonic() + 10
            while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
                time.sleep(0.01)
        comm.barrier()

    run_ranks(work, 2, timeout_s=20)
    (path,) = tmp_path.glob("*.json")
    entries = json.loads(path.read_text())["entries"]
    assert [entry["state"] for entry in entries] == ["completed", "started"]


def test_signal_of_the_user_is_left_alone(monkeypatch):
    monkeypatch.setenv("PYCOLL_DUMP_SIGNAL", "SIGUSR2")
    monkeypatch.setenv("PYCOLL_DOCTOR_SIGNAL", "SIGUSR1")

    def work(comm: Comm, heard: list[int]) -> tuple[list[int], int]:
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), signum)
        return heard, comm._ranks()[comm.rank]["stack_signal"]

    heard: list[int] = []
    old = [signal.signal(s, lambda n, _: heard.append(n)) for s in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        results = run_ranks(work, 2, heard)
    finally:
        for signum, handler in zip((signal.SIGUSR1, signal.SIGUSR2), old, strict=True):
            signal.signal(signum, handler)
    assert results == [([signal.SIGUSR1, signal.SIGUSR2], 0)] * 2


def test_skew_table_counts_the_last_ranks():
    operations = [
        {0: ("barrier", 10), 1: ("barrier", 3_010)},
        {0: ("barrier", 50), 1: ("barrier", 40)},
    ]
    mixed = {0: ("barrier", 1), 1: ("all_reduce", 2)}
    (row,) = flight.skew_table([*operations, mixed])
    assert row["collective"] == "barrier"
    assert row["operations"] == 2
    assert row["max_skew_us"] == 3.0
    assert row["last"] == {0: 1, 1: 1}


@on_ranks(2)
def test_record_says_that_an_operation_ran_directly(comm):
    x = comm.empty((100_000,), "f32")
    x[:] = 1
    comm.all_reduce(x, algorithm="two_shot/direct")
    assert comm.flight_record()[-1]["algorithm"] == "two_shot/direct"
