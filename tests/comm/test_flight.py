"""Records of the last operations: what they hold, where calls came from, who comes last."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest
from comm_cases import both

import pycoll
from pycoll import CollectiveMismatchError, TimeoutError, run_ranks
from pycoll.observe import flight

pytestmark = pytest.mark.ranks


def step(comm: pycoll.Communicator, x: np.ndarray) -> None:
    comm.all_reduce(x, "max")  # the line that a record names


STEP_SITE = f"{os.path.relpath(__file__)}:{step.__code__.co_firstlineno + 1} in step"


@both
def test_record_holds_the_call_its_times_and_its_place(threads):
    def work(comm: pycoll.Communicator) -> tuple[list[dict], int, int]:
        before = time.monotonic_ns()
        step(comm, np.ones((3, 4), np.float32))
        comm.broadcast(np.ones(5, np.int64), root=1, algorithm="star")
        comm.barrier()
        return comm.flight_record(all_ranks=True), before, time.monotonic_ns()

    records, before, after = run_ranks(work, 2, threads=threads)[0]
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
    assert barrier["site"].endswith(
        "in test_record_holds_the_call_its_times_and_its_place.<locals>.work"
    )
    for record in own:
        assert not record["failed"]
        assert before - 10_000 <= record["entered_ns"] <= record["finished_ns"] <= after + 10_000
    entered = [record["entered_ns"] for record in own]
    assert entered == sorted(entered)
    peers = [record for record in records if record["rank"] == 1]
    assert peers[0]["digest"] == reduce["digest"]


def test_ring_keeps_the_last_1024_operations():
    def work(comm: pycoll.Communicator) -> list[int]:
        for _ in range(1100):
            comm.all_reduce(np.ones(1))
        return [record["sequence"] for record in comm.flight_record()]

    for sequences in run_ranks(work, 2, threads=True):
        assert sequences == list(range(77, 1101))


@both
def test_many_places_in_the_code_are_told_apart(threads):
    """More places than the cache of places has room for, each called more than once."""
    code = "".join(f"def f{i}(comm, x): comm.all_reduce(x)\n" for i in range(200))
    names: dict = {}
    exec(compile(code, "places.py", "exec"), names)

    def work(comm: pycoll.Communicator) -> list[str]:
        for _ in range(3):
            for i in range(200):
                names[f"f{i}"](comm, np.ones(1))
        return [record["site"] for record in comm.flight_record()]

    sites = run_ranks(work, 2, threads=threads)[0]
    assert sites == [f"places.py:{i + 1} in f{i}" for i in range(200)] * 3


@both
def test_timeout_says_what_the_late_rank_did_last(threads):
    def work(comm: pycoll.Communicator) -> None:
        step(comm, np.ones(3, np.float32))
        if comm.rank == 1:
            time.sleep(0.7)
            return
        comm.all_reduce(np.ones(2))

    with pytest.raises(TimeoutError) as caught:
        run_ranks(work, 2, threads=threads, timeout_s=0.3)
    text = str(caught.value)
    assert "rank 1 has not entered it: it finished #1, all_reduce(shape (3,), dtype f32" in text
    assert f"at {STEP_SITE}, 0." in text
    assert "in all_reduce(shape (2,), dtype f64, op sum) at " in text


@both
def test_mismatch_names_the_place_of_both_calls(threads):
    def work(comm: pycoll.Communicator) -> None:
        if comm.rank == 0:
            step(comm, np.ones(3))
        else:
            comm.barrier()

    with pytest.raises(CollectiveMismatchError) as caught:
        run_ranks(work, 2, threads=threads, timeout_s=10)
    text = str(caught.value)
    assert f"op max) at {STEP_SITE}" in text
    assert f"barrier() at {os.path.relpath(__file__)}:" in text


@both
def test_straggler_is_the_rank_that_comes_last(threads):
    def work(comm: pycoll.Communicator) -> list[dict]:
        for _ in range(5):
            if comm.rank == 2:
                time.sleep(0.02)
            comm.all_reduce(np.ones(3))
        return comm.stragglers()

    (row,) = run_ranks(work, 3, threads=threads)[0]
    assert row["collective"] == "all_reduce"
    assert row["operations"] == 5
    assert row["median_skew_us"] > 10_000
    assert row["last"][2] >= 4


def test_record_is_dumped_on_error_and_holds_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLL_FLIGHT_DIR", str(tmp_path))

    def work(comm: pycoll.Communicator) -> None:
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

    def work(comm: pycoll.Communicator) -> None:
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

    def work(comm: pycoll.Communicator, heard: list[int]) -> tuple[list[int], int]:
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


def test_skew_table_counts_who_came_last():
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


@both
def test_record_says_that_an_operation_ran_directly(threads):
    def work(comm: pycoll.Communicator) -> str:
        x = comm.empty((100_000,), "f32")
        x[:] = 1
        comm.all_reduce(x, algorithm="two_shot/direct")
        return comm.flight_record()[-1]["algorithm"]

    assert run_ranks(work, 2, threads=threads) == ["two_shot/direct"] * 2
