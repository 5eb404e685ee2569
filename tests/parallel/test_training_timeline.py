"""The timeline of a step: compute, bubbles and collectives of all ranks in one file."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_gpt import GPT, PLAN, batches

from pycoll import parallel as pc
from pycoll import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


def test_trace_has_compute_bubbles_and_collectives_of_all_ranks(tmp_path):
    path = tmp_path / "trace.json"

    def work(comm):
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
        # Microbatches, blocks of the stage, twice forward and twice backward; and the ends.
        assert len(inside) >= 4 * 2 * 4
        for event in inside:
            assert event["ts"] >= steps[0]["ts"] and event["dur"] >= 0
