"""Times within a step: gradients are reduced while ranks compute; the trace has all spans."""

from __future__ import annotations

import json
import time

import torch
from mesh_cases import in_one_world
from tiny_gpt import GPT, PLAN, batches
from torch import nn

from pycoll import parallel as pc
from pycoll import run_ranks

DIM, PAUSE_S = 16, 0.2
computed_ns: list[int] = []  # when the slow backward was done


class SlowBackward(nn.Linear):
    """Pauses before it passes its gradient on."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.pause)
        return y

    def pause(self, gradient) -> None:
        time.sleep(PAUSE_S)
        computed_ns.append(time.monotonic_ns())


def one_step(comm, sizes: dict, schedule: str, zero: int):
    """The stage, its number of reductions, and how many ended while this rank still computed."""
    mesh = pc.mesh(**sizes, comm=comm)
    block = (DIM * DIM + DIM) * 4
    # The gradients of the first layer are the last ones.
    model = nn.Sequential(SlowBackward(DIM, DIM), *(nn.Linear(DIM, DIM) for _ in range(3)))
    options = {"schedule": schedule, "zero": zero, "bucket_mb": block / 2**20}
    model = pc.parallelize(model, mesh, pp="", **options)
    x = torch.randn(4, DIM)
    computed_ns.clear()
    model.step(x, x, loss=lambda out, y: (out.sum(), out.numel()), microbatches=2)
    reduced = [
        record["finished_ns"]
        for record in mesh.comm("dp").flight_record()
        if record["nbytes"] in (block, block // 2) and "reduce" in record["collective"]
    ]
    end = max(computed_ns, default=0)
    return mesh.rank("pp"), len(reduced), sum(ns < end for ns in reduced)


def test_gradients_are_reduced_while_a_rank_still_computes():
    stages = {"pp": 2, "dp": 2}
    cases = [
        (2, {"dp": 2}, "1f1b", 0),
        (2, {"dp": 2}, "1f1b", 1),
        (4, stages, "1f1b", 0),
        (4, stages, "zbv", 0),
        (4, stages, "interleaved_1f1b", 2),
    ]
    for case, found in zip(cases, in_one_world(one_step, cases), strict=True):
        for stage, reduced, early in found:
            # Each of its layers once, however many microbatches. Stage 0 has the slow one.
            assert reduced == 8 // case[0], case
            assert stage > 0 or early > 0, case


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
        with pc.trace(mesh, path.with_suffix(".svg")):
            step()

    run_ranks(work, 4)
    picture = path.with_suffix(".svg").read_text()
    assert all(text in picture for text in ("rank 3: pp 1, tp 1", "bubble", "tp collectives"))
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
