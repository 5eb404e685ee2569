"""What benchmarks/compare.py builds on: oracle, floor, record, ratios, and one library's ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
from compare import Run, chosen_cases, sizes_of
from floor import LOOPS, Floor
from jobs import Job, UnsupportedError
from measure import QUICK, Turn, measure_row
from oracle import COLLECTIVES, DTYPES, Message, encode, wrong_elements
from peers import LIBRARIES, PeerError
from record import Case, Record, RecordError, Row, Timing
from report import MIB, OURS, Summary, table, verdicts
from rich.progress import Progress

pure = pytest.mark.pure


def by_definition(message: Message) -> list[np.ndarray]:
    """What every rank gets, straight from what the ranks bring."""
    n = message.n
    brought = [message.values(rank) for rank in range(n)]
    blocks = [np.split(x, n) if x.size % n == 0 else [] for x in brought]
    return {
        "all_reduce": lambda: [sum(brought)] * n,
        "reduce_scatter": lambda: [sum(b[rank] for b in blocks) for rank in range(n)],
        "all_gather": lambda: [np.concatenate(brought)] * n,
        "all_to_all": lambda: [np.concatenate([b[rank] for b in blocks]) for rank in range(n)],
        "broadcast": lambda: [brought[0]] * n,
    }[message.collective]()


@pure
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_oracle_expects_what_the_collective_defines(collective, n):
    message = Message(collective, "f32", n, 4 * n * 100)
    for rank, result in enumerate(by_definition(message)):
        np.testing.assert_array_equal(message.expected(rank), result)
        assert wrong_elements(result, message, rank) is None
        result = result.copy()
        result[-1] += 1
        assert "1 of" in wrong_elements(result, message, rank)


@pure
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_oracle_blocks_in_the_wrong_place_are_seen(collective):
    message = Message(collective, "f32", 4, 4 * 4 * 100)
    expected = message.expected(1)
    assert wrong_elements(np.roll(expected, expected.size // 4), message, 1)


@pure
@pytest.mark.parametrize("n", [2, 4, 8])
def test_oracle_values_are_exact_in_bf16(n):
    message = Message("all_reduce", "bf16", n, 4096)
    assert message.count == 2048
    partial = np.zeros(message.count, np.float32)
    for rank in range(n):
        partial += message.values(rank)
        bits = encode(partial, "bf16").astype(np.uint32) << 16
        np.testing.assert_array_equal(bits.view(np.float32), partial)


def a_floor() -> Floor:
    times = {1024: 1.0, 4096: 2.0}
    return Floor(0.5, {loop: times for loop, _ in LOOPS.values()})


@pure
def test_floor_is_flight_and_the_time_of_the_bytes_of_one_core():
    floor = a_floor()
    assert set(LOOPS) == set(COLLECTIVES)
    assert floor.us("all_reduce", 2, 2048) == 1.5  # each core half of every operand
    assert floor.us("all_reduce", 2, 5120) == 2.0  # half way between two measured sizes
    assert floor.us("all_reduce", 4, 8192) == 4.5  # beyond them, at the largest one's rate
    assert floor.us("broadcast", 2, 1024) == 1.0
    assert Floor.of_record(json.loads(json.dumps(floor.as_record()))) == floor


@pure
def test_sizes_hold_one_element_of_every_rank():
    assert sizes_of(Case("all_reduce", "f32", 8), [], 4, 64) == [4, 16, 64]
    assert sizes_of(Case("all_gather", "f32", 2), [], 4, 64) == [8, 16, 64]
    assert sizes_of(Case("all_to_all", "bf16", 8), [4, 100], 4, 64) == [16, 96]
    every = chosen_cases("", "", "")
    assert {(c.collective, c.n) for c in every} >= {("all_reduce", 8), ("all_to_all", 2)}


@pure
def test_turn_slow_calls_sit_out_rounds():
    assert Turn.of(1.0, QUICK).block == 50
    assert Turn.of(1e5, QUICK) == Turn(1, 3, 1, 3)
    assert Turn.of(1e7, QUICK).rounds == 1


def timing(us: float) -> Timing:
    return Timing(us, us, us, 20, 1)


def a_record(path: Path, question: str = "q", commit: str = "c") -> Record:
    return Record.open(path, {"question": question, "machine": {"commit": commit}, "notes": {}})


@pure
def test_record_unfinished_goes_on_where_it_stopped(tmp_path: Path):
    path, case = tmp_path / "new" / "r.json", Case("all_reduce", "f32", 2)
    record = a_record(path)
    record.add(case, 4, Row(0.1, {"pycoll": timing(1)}))
    again = a_record(path)
    assert again.has(case, 4) and not again.has(case, 16)
    assert again.rows == record.rows
    for other in ({"question": "x"}, {"commit": "x"}):
        with pytest.raises(RecordError, match="--fresh"):
            a_record(path, **other)
    again.facts["complete"] = True
    again.save()
    assert a_record(path, "x").rows == {}  # A finished one is replaced.
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


@pure
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": {"a": {}}}'])
def test_record_of_something_else_is_refused(tmp_path: Path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(RecordError, match="no record"):
        Record.load(tmp_path / "r.json")


ROWS = {
    4: Row(0.5, {"pycoll": timing(1), "impi": timing(2), "gloo": timing(9)}),
    MIB: Row(5.0, {"pycoll": timing(10), "impi": timing(90), "gloo": timing(80)}),
    64 * MIB: Row(None, {"pycoll": timing(10), "gloo": timing(20)}),
}


@pure
def test_report_ratio_is_that_to_the_fastest_peer():
    summary = Summary.of(ROWS, "pycoll")
    assert summary.ratios == {4: 2, MIB: 8, 64 * MIB: 2}
    assert summary.mean == pytest.approx(32 ** (1 / 3))
    assert summary.line() == "geometric mean 3.17, lowest 2.00 at 4 B"
    assert Summary.of(ROWS, "pycoll", ("impi",)).ratios == {4: 2, MIB: 9}
    assert table(Case("all_reduce", "f32", 2), ROWS).row_count == len(ROWS) + 1


@pure
def test_report_verdicts_name_where_a_goal_is_missed():
    found = {entry["goal"]: entry for entry in verdicts({Case("all_reduce", "f32", 2): ROWS})}
    assert found["never slower than the best peer"]["met"]
    assert found["from 16 MiB, best peer / pycoll"]["missed_at"] == [64 * MIB]
    assert found["share of the floor"]["missed_at"] == [MIB]
    assert found["geometric mean of best peer / pycoll"]["met"]
    moved = verdicts({Case("all_gather", "f32", 2): ROWS})
    assert {entry["goal"] for entry in moved} >= {"never slower than the best MPI"}


class FakeJob:
    """Answers at once; `broken` libraries fail a check, `lacking` ones have no such collective."""

    def __init__(self, library, n, bench_dir, broken=(), lacking=()):
        self.name, self.broken, self.lacking = library.name, broken, lacking
        self.hello = [{"version": "1", "versions": {}}]
        self.stopped = False

    def prepare(self, collective, dtype, nbytes):
        if self.name in self.lacking:
            raise UnsupportedError("no")

    def check(self):
        if self.name in self.broken:
            raise PeerError("wrong result")

    def measure(self, warmup, samples, block):
        return [1e5] * samples

    def stop(self):
        self.stopped = True


@pure
def test_measure_row_a_library_that_fails_is_stopped_and_left_out():
    jobs = {
        name: FakeJob(LIBRARIES[name], 2, Path(), {"gloo"}, {"impi"})
        for name in ("pycoll", "gloo", "impi")
    }
    gloo, failures = jobs["gloo"], []
    failed = lambda name, error: failures.append(name)  # noqa: E731
    timings = measure_row(jobs, Case("all_reduce", "f32", 2), 4, QUICK, failed)
    assert list(timings) == ["pycoll"] and timings["pycoll"].num_samples == 9
    assert sorted(failures) == ["gloo", "impi"] and gloo.stopped
    assert set(jobs) == {"pycoll", "impi"}


@pure
def test_run_stopped_in_the_middle_measures_the_rest_when_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("compare.Job", FakeJob)
    plan = {Case("all_reduce", "f32", 2): [4, 16], Case("all_gather", "f32", 2): [8]}
    facts = {"question": 1, "machine": {}, "notes": {}, "libraries": {}, "took_s": 0.0}
    measured = []

    def run(stop_after: int) -> Record:
        record = Record.open(tmp_path / "r.json", facts)
        add = record.add

        def add_one(case, nbytes, row):
            add(case, nbytes, row)
            measured.append((str(case), nbytes))
            if len(measured) == stop_after:
                raise KeyboardInterrupt

        monkeypatch.setattr(record, "add", add_one)
        Run(record, plan, ["pycoll"], QUICK, a_floor(), Progress(disable=True)).measure()
        return record

    with pytest.raises(KeyboardInterrupt):
        run(1)
    record = run(-1)
    assert measured == [("all_reduce f32 2", 4), ("all_reduce f32 2", 16), ("all_gather f32 2", 8)]
    assert {case: list(rows) for case, rows in record.rows.items()} == plan


@pytest.mark.ranks
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", OURS)
def test_job_of_pycoll_checks_and_times_what_it_has(name, monkeypatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    library = replace(LIBRARIES[name], pin=lambda n: False)
    job = Job(library, 2, Path(sys.prefix))
    try:
        for collective in COLLECTIVES:
            for dtype in DTYPES:
                try:
                    job.prepare(collective, dtype, 4096)
                except UnsupportedError:
                    continue
                job.check()
                samples_us = job.measure(1, 3, 2)
                assert len(samples_us) == 3 and min(samples_us) > 0
                job.check()
    finally:
        job.stop()


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_job_wrong_result_and_lost_rank_are_named(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = Job(LIBRARIES["pycoll"], 2, Path(sys.prefix))
    try:
        job.prepare("all_reduce", "f32", 64)
        job._processes[1].kill()
        with pytest.raises(PeerError, match="pycoll, 2 ranks: a rank"):
            job.check()
            job.check()
    finally:
        job.stop()
    assert all(process.poll() is not None for process in job._processes)
