"""Compute, bubbles and transfers in one trace with the collectives."""

from __future__ import annotations

import json

import pytest
from command_line import invoke
from models import batch, gpt, loss_sum

import pycoll
from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline import trace_events


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two replicas of a pipeline of two ranks, which reduce their gradients."""
    folder = tmp_path_factory.mktemp("flight")
    x, y = batch(4)

    def rank(comm):
        pp, dp = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        model = gpt(depth=2)
        cut = pipeline.cut(model, "blocks", 2, [pp.rank])
        runtime = pipeline.PipelineRuntime(cut, "zb1p", pp, loss_fn=loss_sum, record_steps=2)
        for _ in range(3):
            model.zero_grad()
            runtime.step(x, y, microbatches=3)
            for parameter in model.parameters():
                dp.all_reduce(parameter.grad)
        written = runtime.write_timeline(folder, also=[dp])
        assert runtime.bubble_s >= 0
        return [path.name for path in written]

    names = [name for of in pycoll.run_ranks(rank, 4, timeout_s=20) for name in of]
    assert len(names) == len(set(names)) == 12  # a timeline and two flight records for each rank
    return folder


def test_trace_has_compute_bubbles_transfers_and_collectives_in_one_time(folder, tmp_path):
    out = tmp_path / "trace.json"
    assert "all_reduce" in invoke("trace", str(folder), "-o", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"compute", "bubble", "transfer", "collective", "message"} <= kinds
    compute = [event for event in events if event.get("cat") == "compute"]
    assert len(compute) == 2 * 2 * 2 * 3 * 3  # replicas, ranks, steps, microbatches, F I W
    names = {event["name"] for event in compute}
    assert {"forward 0", "backward of inputs 2", "backward of weights 1"} <= names
    # The steps that are kept lie among the collectives that follow them.
    reduces = [event for event in events if event["name"] == "all_reduce"]
    assert min(e["ts"] for e in compute) < max(e["ts"] for e in reduces)
    assert max(e["ts"] for e in compute) > min(e["ts"] for e in reduces)
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sum(name.startswith("pipeline zb1p on communicator") for name in processes) == 2


def test_slices_of_a_rank_follow_each_other_and_arrows_go_forward(folder):
    timelines = trace_events.read([folder])
    assert [(t.rank, len(t.steps)) for t in timelines] == [(0, 2), (1, 2)] * 2
    start = min(trace_events.bounds(timelines))
    events = trace_events.events(timelines, 5, lambda ns: (ns - start) / 1e3)
    tracks: dict = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(tracks) == {(pid, rank) for pid in (5, 6) for rank in (0, 1)}
    for track in tracks.values():
        track.sort(key=lambda event: event["ts"])
        for before, after in zip(track, track[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    sent = {(e["pid"], e["id"]): e["ts"] for e in events if e["ph"] == "s"}
    came = {(e["pid"], e["id"]): e["ts"] for e in events if e["ph"] == "f"}
    assert sent.keys() == came.keys() and len(sent) == 2 * 2 * 2 * 3
    assert all(sent[key] <= came[key] for key in sent)
    live = [e["args"]["microbatches"] for e in events if e["ph"] == "C" and e["pid"] == 5]
    assert max(live) == 2 and min(live) == 0


def test_file_that_is_no_timeline_is_refused(tmp_path):
    (tmp_path / "pipeline-x.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a pipeline timeline"):
        trace_events.read([tmp_path])
