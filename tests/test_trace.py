"""Flight records as traces: for Perfetto, for torch's fr_trace, and as a table of late ranks."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke

import pycoll
from pycoll import run_ranks
from pycoll.observe import trace

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


@pytest.fixture
def mismatch(tmp_path, monkeypatch) -> Path:
    """The records of two ranks whose second all_reduce differs in shape."""
    folder = tmp_path / "flight"
    monkeypatch.setenv("PYCOLL_FLIGHT_DIR", str(folder))

    def work(comm: pycoll.Communicator) -> None:
        for count in (3, 4 + comm.rank):
            comm.all_reduce(np.ones(count, np.float32))

    run_ranks(work, 2, return_errors=True, timeout_s=10)
    return folder


def test_trace_has_a_slice_for_each_operation_of_each_rank(mismatch, tmp_path):
    out = tmp_path / "trace.json"
    invoke("trace", str(mismatch), "-o", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "rank 0", 1: "rank 1"}
    for rank in (0, 1):
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        assert [e["args"]["seq"] for e in slices] == [1, 2]
        assert [e["args"]["bytes"] for e in slices] == [12, 16 + 4 * rank]
        assert [e["args"]["state"] for e in slices] == ["completed", "failed"]
        assert all(e["name"] == "all_reduce" and e["dur"] >= 0 <= e["ts"] for e in slices)
        assert "test_trace.py:" in slices[0]["args"]["site"]
        assert slices[0]["ts"] + slices[0]["dur"] <= slices[1]["ts"]
    skews = [e["args"]["us"] for e in events if e["ph"] == "C"]
    assert len(skews) == 2 and min(skews) >= 0
    starts, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert [e["id"] for e in starts] == [e["id"] for e in ends]


def test_trace_table_counts_arrivals(mismatch):
    ((_, rows),) = json.loads(invoke("trace", str(mismatch), "--json")).items()
    (row,) = rows
    assert (row["collective"], row["operations"]) == ("all_reduce", 2)
    assert sum(row["last"].values()) == 2
    assert "all_reduce" in invoke("trace", str(mismatch))


def test_trace_takes_a_rank_without_a_file_from_the_others(mismatch):
    for path in mismatch.glob("*rank_1.json"):
        path.unlink()
    ((_, ranks),) = trace.read([mismatch]).items()
    assert [len(ranks[rank]) for rank in (0, 1)] == [2, 2]


def test_trace_of_no_records_is_a_usage_error(tmp_path):
    assert "no flight records" in invoke("trace", str(tmp_path), status=2)
    (tmp_path / "pycoll-x-rank_0.json").write_text("{}")
    assert "is not a flight record" in invoke("trace", str(tmp_path), status=2)


def test_torch_fr_trace_finds_the_mismatch(mismatch, tmp_path):
    fr_trace = pytest.importorskip(
        "torch.distributed.flight_recorder.fr_trace", reason="this torch has no fr_trace"
    )
    logger = logging.getLogger("fr_trace")
    loggers = [logger, *(v for k, v in vars(fr_trace).items() if isinstance(v, logging.Logger))]
    from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger

    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    loggers.append(FlightRecorderLogger().logger)
    for one in loggers:
        one.addHandler(handler)
    try:
        invoke("trace", str(mismatch), "--fr-trace", str(tmp_path / "fr"))
        assert sorted(path.name for path in (tmp_path / "fr").iterdir()) == ["rank_0", "rank_1"]
        fr_trace.main([str(tmp_path / "fr"), "-o", str(tmp_path / "db")])
    finally:
        for one in loggers:
            one.removeHandler(handler)
    text = heard.getvalue()
    assert "SIZE_OR_SYNTAX_MISMATCH" in text, text
    assert "[[4]]" in text and "[[5]]" in text
    assert (tmp_path / "db").exists()
