"""The parts of benchmarks/compare.py: floor, ratios, rounds, and one library's ranks."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
from compare import COLLECTIVES, DTYPES, Run, cases_of, chosen_groups
from floor import FLOORS, LOOPS, FloorJob, loop_request, new_request
from jobs import Job, UnsupportedError
from measure import MOST_TRIES, QUICK, measure_row
from peers import LIBRARIES, PeerError
from report import MIB, OURS, Group, Line, Summary, grouped, markdown, verdicts
from rich.progress import Progress

from pycoll.bench.case import Case
from pycoll.bench.record import Record
from pycoll.bench.timing import Effort, Timing

pure = pytest.mark.pure
ALL_REDUCE = Group("all_reduce", "f32", 2)


class Moving(FloorJob):
    """Cores between which a flag flies so long, look after look."""

    def __init__(self, flights_us: list[float]) -> None:
        self.flights_us, self.num_looks = flights_us, 0

    def flight_us(self) -> float:
        self.num_looks += 1
        return self.flights_us[min(self.num_looks, len(self.flights_us)) - 1]

    def prepare(self, case: Case) -> None: ...

    def time_blocks(self, warmup: int, num_calls: int, num_blocks: int) -> list[float]:
        return [1.0] * num_blocks


@pure
@pytest.mark.parametrize(
    ("flights_us", "num_tries"),
    [([0.05], 1), ([0.05, 0.25], 2), ([0.05, 0.06], 1), ([0.05, 0.25] * 100, MOST_TRIES)],
)
def test_message_is_measured_again_if_the_cores_move(monkeypatch, flights_us, num_tries):
    monkeypatch.setattr("measure.LOOK_PERIOD_S", 0.0)
    case = Case.of_size("all_reduce", "f32", 2, 4)

    def looks(flights_us: list[float]) -> int:
        job = Moving(flights_us)
        (row,) = measure_row({"floor": job}, case, QUICK, lambda *_: None)
        assert row.timing.median_s == 1.0
        return job.num_looks

    assert looks(flights_us) == num_tries * looks([0.05])


@pure
def test_floor_asks_for_the_bytes_that_each_of_two_cores_passes_over():
    assert set(LOOPS) == set(COLLECTIVES)
    asked = {
        ("all_reduce", 2): "2to2 65536",  # each core half of every operand
        ("all_reduce", 8): "2to2 262144",
        ("all_to_all", 2): "1to1 131072",
        ("broadcast", 4): "1to1 196608",
    }
    for (collective, n), request in asked.items():
        assert loop_request(Case.of_size(collective, "f32", n, 128 << 10)) == request
    assert new_request(Case.of_size("broadcast", "f32", 2, MIB)) == "broadcast 1048576"
    for n, nbytes in ((4, MIB), (2, 4096)):
        with pytest.raises(UnsupportedError, match="2 ranks, from 64 KiB"):
            new_request(Case.of_size("broadcast", "f32", n, nbytes))


@pytest.mark.ranks
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FLOORS)
def test_floor_takes_turns_as_a_library_does(name, tmp_path):  # 3 s: compiles the program
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the floor needs two cores")
    job = FloorJob(name, tmp_path)
    try:
        job.prepare(Case.of_size("all_reduce", "f32", 2, 64 << 10))
        few_s, more_s = job.time_blocks(0, 1, 2), job.time_blocks(0, 1000, 1)
        assert len(few_s) == 2 and 0 < min(few_s) < more_s[0]
        job._process.kill()
        with pytest.raises(PeerError, match=f"{name}: no answer"):
            job.time_blocks(0, 1, 1)
    finally:
        job.stop()


@pytest.mark.ranks
def test_floor_that_cannot_be_compiled_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PeerError, match="no-such-compiler not found: install g"):
        FloorJob("floor", tmp_path)


@pure
def test_sizes_hold_one_element_of_every_rank():
    def sizes(group: Group, *given) -> list[int]:
        return [case.nbytes for case in cases_of(group, *given)]

    assert sizes(Group("all_reduce", "f32", 8), [], 4, 64) == [4, 16, 64]
    assert sizes(Group("all_gather", "f32", 2), [], 4, 64) == [8, 16, 64]
    assert sizes(Group("all_to_all", "bf16", 8), [4, 100], 4, 64) == [16, 96]
    every = chosen_groups("", "", "")
    assert {(g.collective, g.n) for g in every} >= {("all_reduce", 8), ("all_to_all", 2)}


def line(**times_us: float) -> Line:
    return Line({name: Timing(us / 1e6, us / 1e6, us / 1e6, 20) for name, us in times_us.items()})


LINES = {
    4: line(floor=0.5, pycoll=1, impi=2, gloo=9),
    MIB: line(floor=5.0, pycoll=10, impi=90, gloo=80),
    64 * MIB: line(pycoll=10, gloo=20),
}


@pure
def test_report_ratio_is_that_to_the_fastest_peer():
    summary = Summary.of(LINES, "pycoll")
    assert summary.ratios == pytest.approx({4: 2, MIB: 8, 64 * MIB: 2})
    assert summary.mean == pytest.approx(32 ** (1 / 3))
    assert summary.line() == "geometric mean 3.17, lowest 2.00 at 4 B"
    assert Summary.of(LINES, "pycoll", ("impi",)).ratios == pytest.approx({4: 2, MIB: 9})
    assert "| 1 MiB | 10 | 90 | 80 | 10, 80 | 8.00 | 0.50 |" in markdown(ALL_REDUCE, LINES, 2)
    assert "| 2 ranks on 1 cores |" in markdown(ALL_REDUCE, LINES, 1)
    of_new = line(floor=5.0, floor_new=16.0, pycoll=10.0, pycoll_new=20.0)
    table = markdown(ALL_REDUCE, {MIB: of_new}, 2)
    assert "| floor / pycoll | floor / pycoll, new arrays |" in table
    assert "| 0.50 | 0.80 |" in table


@pure
def test_report_verdicts_name_where_a_goal_is_missed():
    found = {entry["goal"]: entry for entry in verdicts({ALL_REDUCE: LINES})}
    assert found["never slower than the best peer"]["met"]
    assert found["from 16 MiB, best peer / pycoll"]["missed_at"] == [64 * MIB]
    assert found["share of the floor"]["missed_at"] == [MIB]
    assert found["geometric mean of best peer / pycoll"]["met"]
    moved = verdicts({Group("all_gather", "f32", 2): LINES})
    assert {entry["goal"] for entry in moved} >= {"never slower than the best MPI"}


class FakeJob:
    """Answers at once; `broken` libraries fail a check, `lacking` ones have no such collective."""

    def __init__(self, library, n, bench_dir, broken=(), lacking=()):
        self.name, self.broken, self.lacking = library.name, broken, lacking
        self.hello = [{"version": "1", "versions": {}}]
        self.stopped = False

    def prepare(self, case):
        if self.name in self.lacking:
            raise UnsupportedError("no")

    def check(self):
        if self.name in self.broken:
            raise PeerError("wrong result")

    def time_blocks(self, warmup, num_calls, num_blocks):
        return [1e-3 * num_calls] * num_blocks

    def stop(self):
        self.stopped = True


@pure
def test_measure_row_a_library_that_fails_is_stopped_and_left_out():
    jobs = {
        name: FakeJob(LIBRARIES[name], 2, Path(), {"gloo"}, {"impi"})
        for name in ("pycoll", "gloo", "impi")
    }
    gloo, failures = jobs["gloo"], []
    case = Case.of_size("all_reduce", "f32", 2, 4)
    (row,) = measure_row(jobs, case, QUICK, lambda name, error: failures.append(name))
    assert row.case == case and row.timing == Timing(1e-3, 1e-3, 1e-3, 2 * QUICK.blocks)
    assert sorted(failures) == ["gloo", "impi"] and gloo.stopped
    assert set(jobs) == {"pycoll", "impi"}


@pure
def test_run_stopped_in_the_middle_measures_the_rest_when_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("compare.Job", FakeJob)
    monkeypatch.setattr("compare.FLOORS", {})
    plan = cases_of(ALL_REDUCE, [4, 16], 4, 0) + cases_of(Group("all_gather", "f32", 2), [8], 4, 0)
    facts = {"question": 1, "machine": {}, "notes": {}, "libraries": {}, "took_s": 0.0}
    measured = []

    def run(stop_after: int) -> Record:
        record = Record.open(tmp_path / "r.json", facts)
        add = record.add

        def add_one(*rows):
            add(*rows)
            measured.append(rows[0].case)
            if len(measured) == stop_after:
                raise KeyboardInterrupt

        monkeypatch.setattr(record, "add", add_one)
        Run(record, plan, ["pycoll"], Effort(2), Progress(disable=True)).measure()
        return record

    with pytest.raises(KeyboardInterrupt):
        run(1)
    record = run(-1)
    assert measured == plan
    found = {str(group): list(lines) for group, lines in grouped(record).items()}
    assert found == {"all_reduce, f32, 2 ranks": [4, 16], "all_gather, f32, 2 ranks": [8]}


@pytest.mark.ranks
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", OURS)
def test_job_of_pycoll_checks_and_times_what_it_has(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    library = replace(LIBRARIES[name], pin=lambda n: False)
    job = Job(library, 2, Path(sys.prefix))
    try:
        for collective in COLLECTIVES:
            for dtype in DTYPES:
                rewritten = (collective, dtype) == ("all_reduce", "f32")
                try:
                    job.prepare(Case.of_size(collective, dtype, 2, 4096, rewritten=rewritten))
                except UnsupportedError:
                    continue
                job.check()
                times_s = job.time_blocks(1, 2, 3)
                assert len(times_s) == 3 and min(times_s) > 0
                job.check()
    finally:
        job.stop()


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_job_wrong_result_and_lost_rank_are_named(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = Job(LIBRARIES["pycoll"], 2, Path(sys.prefix))
    try:
        job.prepare(Case.of_size("all_reduce", "f32", 2, 64))
        job._processes[1].kill()
        with pytest.raises(PeerError, match="pycoll, 2 ranks: a rank"):
            job.check()
            job.check()
    finally:
        job.stop()
    assert all(process.poll() is not None for process in job._processes)
