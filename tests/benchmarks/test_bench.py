"""The library that all benchmarks share: oracle, cases, timing, records; and the harnesses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("typer")
from jobs import Job
from measure import QUICK, measure_row
from peers import LIBRARIES
from test_perf_binaries import run as run_perf

from pycoll import _core
from pycoll.bench import arithmetic, timing
from pycoll.bench.case import Case
from pycoll.bench.oracle import BARRIER, COLLECTIVES
from pycoll.bench.record import Record, RecordError, Row
from pycoll.bench.timing import BLOCK_S, FEWEST_BLOCKS, Effort, LeftOut, Timing

ROOT = Path(__file__).parents[2]
pure = pytest.mark.pure


# Oracle and cases.


@pure
def test_tables_of_the_oracle_are_those_of_the_core():
    rows = [*COLLECTIVES.values(), BARRIER]
    core = {row.name: row for row in _core.collectives()}
    assert set(core) == {row.name for row in rows}
    for row in rows:
        mine, its = row, core[row.name]
        assert (mine.has_op, mine.has_root) == (its.has_op, its.has_root), row.name
        for n in (1, 2, 3, 8):
            assert mine.blocks_per_payload(n) == its.blocks_per_payload(n), (row.name, n)
            assert mine.busbw_factor(n) == pytest.approx(its.busbw_factor(n)), (row.name, n)
    assert [(d, arithmetic.KIND[d], arithmetic.ITEMSIZE[d]) for d in arithmetic.DTYPES] == [
        tuple(row) for row in _core.dtypes()
    ]
    assert _core.ops() == arithmetic.OPS
    cells = [(d, op) for d in arithmetic.DTYPES for op in arithmetic.OPS]
    assert [cell for cell in cells if not _core.why_unsupported(*cell)] == arithmetic.CELLS


@pure
@pytest.mark.parametrize("n", [2, 5])
def test_case_expects_the_sums_of_its_inputs_exactly_and_sees_each_fault(n):
    every = [Case.of_size(name, dtype, n, 4 * n * 100) for name in COLLECTIVES
             for dtype in ("f32", "bf16", "f8_e5m2", "bool", "c64")]  # fmt: skip
    for case in every:
        inputs = [case.inputs(rank) for rank in range(n)]
        wide = np.stack([arithmetic.widen(x, case.dtype) for x in inputs])
        row = case.row
        shaped = wide.reshape(n, *row.leading(n, case.block))
        for rank in range(n):
            want = case.expected(rank)
            by_definition = row.expected(shaped, rank, 0, "sum")
            assert (want is None) == (by_definition is None), (case, rank)
            if want is None:
                continue
            exact = arithmetic.narrow(by_definition.reshape(-1), case.dtype)
            np.testing.assert_array_equal(want, exact, err_msg=str((case, rank)))
            assert case.why_wrong(rank, want) is None
            got = want.copy()
            got[-1] = got[-1] == 0
            assert f"1 of {want.size}" in case.why_wrong(rank, got), (case, rank)
    moved = Case.of_size("all_to_all", "f32", 4, 1600)
    assert moved.why_wrong(1, np.roll(moved.expected(1), moved.block))  # a block in a wrong place


@pure
def test_case_of_every_op_has_an_expected_result():
    for dtype, op in arithmetic.CELLS:
        if op != "premul":
            case = Case.of_size("all_reduce", dtype, 8, 512, op=op)
            assert case.why_wrong(0, case.expected(0)) is None, case


# Timing.


class Clock:
    """A clock that only calls move: a call takes call_s, and some calls take longer."""

    def __init__(self, call_s: float, delays_s: dict[int, float] | None = None) -> None:
        self.now_s, self.call_s, self.delays_s, self.calls = 0.0, call_s, delays_s or {}, 0
        self.blocks: list[int] = []

    def call(self) -> None:
        self.now_s += self.call_s + self.delays_s.get(self.calls, 0)
        self.calls += 1

    def block(self, num_calls: int) -> float:
        self.blocks.append(num_calls)
        return timing.time_block(self.call, num_calls)


@pytest.fixture
def clock(monkeypatch):
    def start(*given) -> Clock:
        made = Clock(*given)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.now_s))
        return made

    return start


@pure
@pytest.mark.parametrize("call_s", [1e-7, 5e-7, 1e-4, 1.9e-3, 1.0])
def test_block_grows_until_it_takes_long_enough(clock, call_s):
    fake = clock(call_s)
    num_calls, block_s = timing.calibrate(fake.block)
    assert block_s == pytest.approx(num_calls * call_s)
    assert block_s >= BLOCK_S and (num_calls == 1 or block_s < 2.1 * BLOCK_S)
    assert fake.blocks[-2:] == [num_calls] * 2  # it is confirmed


@pure
def test_one_interruption_does_not_decide_the_block(clock):
    fake = clock(5e-7, {0: 0.1, 2: 0.1})  # a cold first call, and an interruption
    num_calls, _ = timing.calibrate(fake.block)
    assert num_calls == 4096
    assert timing.calibrate(fake.block, most=20)[0] == 20


@pure
def test_blocks_are_dealt_to_rounds_and_slow_calls_get_fewer(clock):
    fake = clock(1e-3)
    turns = []

    def time_blocks(name: str, num_calls: int, num_blocks: int) -> list[float]:
        turns.append((name, num_blocks))
        if name == "gone" and len(turns) > 6:
            raise LeftOut
        slower = 1000 if name == "slow" else 1
        return [slower * fake.block(num_calls) for _ in range(num_blocks)]

    effort = Effort(20, rounds=8, limit_s=3.0)
    found = timing.measure(["fast", "slow", "gone"], time_blocks, effort)
    assert set(found) == {"fast", "slow"}
    assert found["fast"].num_calls == 2 * 20 and found["slow"].num_calls == FEWEST_BLOCKS
    assert found["slow"].median_s == pytest.approx(1.0)
    assert [turn for turn in turns if turn[0] == "fast"][-8:] == [("fast", 3)] * 4 + [
        ("fast", 2)
    ] * 4


@pure
def test_timing_counts_median_least_and_p99():
    found = Timing.of([3.0, 1.0, 2.0, *[2.0] * 96, 9.0], 10)
    assert found == Timing(2.0, 1.0, 3.0, 1000)


# Records.


def a_row(nbytes: int = 4, **more) -> Row:
    return Row(Case.of_size("all_reduce", "f32", 2, nbytes, **more), Timing(1e-6, 5e-7, 2e-6, 40))


def a_record(path: Path, question: str = "q", commit: str = "c") -> Record:
    return Record.open(path, {"question": question, "machine": {"commit": commit}})


@pure
def test_record_unfinished_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "new" / "r.json"
    record = a_record(path)
    record.add(a_row(), a_row(library="gloo"))
    record.add(a_row(16))
    again = a_record(path)
    assert again.rows == record.rows and again.find(a_row().case) == a_row()
    assert [len(rows) for rows in again.messages()] == [2, 1]
    lines = path.read_text().splitlines()
    assert sum(line.startswith('{"collective"') for line in lines) == 2  # one for each message
    for other in ({"question": "x"}, {"commit": "x"}):
        with pytest.raises(RecordError, match="another measurement"):
            a_record(path, **other)
    again.facts["complete"] = True
    again.save()
    assert a_record(path, "x").rows == {}  # a finished one is replaced
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


@pure
@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": {"a": {}}}', '{"schema": 2, "rows": []}']
)
def test_record_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(RecordError, match="no record"):
        Record.load(tmp_path / "r.json")


@pure
def test_results_in_the_repository_are_short_records():
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        # benchmarks/replicas.py has results of training, not of messages.
        assert json.loads(text).get("results") or Record.load(path).rows, path


# The harnesses.


@pytest.mark.ranks
@pytest.mark.timeout(420)
def test_harnesses_give_rows_of_the_same_cases_and_fields(binaries, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sizes = [4, 1024]
    command = [sys.executable, "-m", "pycoll", "bench", "--sizes", "4,1K", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {"pycoll bench": json.loads(done.stdout)["rows"]}

    path = tmp_path / "perf.json"
    run_perf(binaries / "all_reduce_perf", "-b", "4", "-e", "1K", "-f", "256", "-J", str(path))
    printed = json.loads(path.read_text())["rows"]
    rows["all_reduce_perf"] = [row for row in printed if not row["in_place"]]
    assert all(row.num_wrong == 0 for row in Record.load(path).rows.values())

    record = Record(tmp_path / "compare.json", {})
    job = Job(LIBRARIES["pycoll"], 2, Path(sys.prefix))
    failures: list = []
    try:
        for nbytes in sizes:
            case = Case.of_size("all_reduce", "f32", 2, nbytes)
            fail = lambda name, error: failures.append(error)  # noqa: E731
            record.add(*measure_row({"pycoll": job}, case, QUICK, fail))
    finally:
        job.stop()
    assert not failures
    rows["compare.py"] = json.loads(record.path.read_text())["rows"]

    first = rows["pycoll bench"]
    for harness, found in rows.items():
        assert [set(row) for row in found] == [set(row) for row in first], harness
        for row, like in zip(found, first, strict=True):
            differ = {"library", "chosen", *asdict(Timing(0, 0, 0, 0)), "algbw", "busbw"}
            for name in set(row) - differ:
                assert row[name] == like[name], (harness, name)
            assert 0 < row["min_s"] <= row["median_s"] <= row["p99_s"], harness
            assert row["num_calls"] >= 20, harness
