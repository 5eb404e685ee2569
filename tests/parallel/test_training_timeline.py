"""The timeline of a step: compute, bubbles and collectives of all ranks in one file."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, PLAN, batches  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402
from pycoll.parallel.tools.draw_layout import draw  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


def test_trace_has_compute_bubbles_and_collectives_of_all_ranks(tmp_path):
    path = tmp_path / "trace.json"

    def work(comm):
        torch.set_num_threads(1)
        mesh = pc.mesh(pp=2, tp=2, comm=comm)
        model = pc.parallelize(GPT(), mesh, tp=PLAN, pp="blocks")
        optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            model.step(*next(batches(1, 4)), loss=pc.cross_entropy, microbatches=4)
            optimizer.step()

        step()
        with pc.trace(mesh, path):
            step()
        step()

    run_ranks(work, 4)
    pytest.importorskip("matplotlib")
    draw(path, tmp_path / "trace.svg")
    assert "rank 3: pp 1, tp 1" in (tmp_path / "trace.svg").read_text()
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {(1, "rank 1: pp 0, tp 1"), (3, "axis tp"), (2, "bubble")} <= names
    spans = [event for event in events if event["ph"] == "X"]
    for rank in range(4):
        mine = [e for e in spans if e["pid"] == rank]
        steps = [e for e in mine if e["cat"] == "steps"]
        assert [e["name"] for e in steps] == ["step 1"]
        # Four microbatches, forward and backward, and the optimizer.
        assert len([e for e in mine if e["cat"] == "compute"]) == 9
        inside = [e for e in mine if e["cat"] == "axis tp"]
        # Of its two blocks twice forward and twice backward; embedding, or classes and losses.
        least = 4 * 2 * 4
        assert len(inside) >= least
        for event in inside:
            assert event["ts"] >= steps[0]["ts"] and event["dur"] >= 0


def test_updates_within_a_step_look_like_the_optimizer(tmp_path):
    pytest.importorskip("matplotlib")
    rank = {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "rank 0"}}
    counts = []
    for name in ("0B0", "0U0"):
        span = {"ph": "X", "pid": 0, "cat": "compute", "name": name, "ts": 0.0, "dur": 1e3}
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [rank, span]}))
        draw(tmp_path / "trace.json", tmp_path / "trace.svg")
        counts.append((tmp_path / "trace.svg").read_text().count("#8e6bbf"))
    assert counts[0] < counts[1]  # in the legend; and in the row, too
