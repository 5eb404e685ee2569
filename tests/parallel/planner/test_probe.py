"""Measured steps of layouts, and devices that are slower than this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_gpt import GPT, PLAN

from pycoll import UsageError, topology
from pycoll import parallel as pc
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.paced import Paced
from pycoll.parallel.planner.probe import step_times
from pycoll.parallel.planner.trace import without_values
from pycoll.topology import Device

CLUSTER = topology.load(
    Path(__file__).resolve().parents[3] / "examples" / "topologies" / "a100_hosts.toml"
)
FEW = pc.Choices(zero=(0, 1), schedules=("1f1b",), axes=("dp", "tp"), sequence_parallel=(False,))


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(vocab=64, dim=16, depth=2, heads=2, context=8, fused=True, drop=0)


def test_probed_layouts_come_first_by_their_measured_time():
    """Two seconds: four ranks start."""
    x = torch.zeros(8, 8, dtype=torch.int64, device="meta")
    options = {"world": 2, "cluster": CLUSTER, "tp": PLAN, "choices": FEW}
    plan = pc.plan(gpt(), x, y=x, loss=pc.cross_entropy, probe=2, **options)
    first, second, third = (of.layout for of in plan.best[:3])
    assert set(plan.measured_s) == {first, second}
    assert 0 < plan.measured_s[first] <= plan.measured_s[second]
    head, *lines = plan.table().splitlines()[1:]
    assert head.split()[:3] == ["layout", "ms/step", "measured"]
    cells = [re.split(r"\s{2,}", line) for line in lines[:3]]
    assert cells[0][2] == f"{plan.measured_s[first] * 1e3:,.4g}"
    assert third not in plan.measured_s and len(cells[2]) == len(cells[0]) - 1
    with pytest.raises(UsageError, match="probe is 11, expected 0 to 10 layouts"):
        pc.plan(gpt(), x, probe=11, **options)


def test_a_paced_step_takes_the_time_of_its_device():
    """A second: steps that sleep for their arithmetic, which no machine can do faster."""
    rate = 20e6
    slow = Device(flops_per_s=rate, memory_bytes_per_s=1e18)
    cluster = topology.Topology(
        levels=(topology.Level(name="host", size=2, link_bytes_per_s=1e18, latency_s=0.0),),
        device=slow,
    )
    x = torch.zeros(4, 8, dtype=torch.int64)
    costs = CostModel(gpt(), x, cluster, y=x, loss=pc.cross_entropy, tp=PLAN, blocks="blocks")
    for layout in (pc.Layout(tp=2), pc.Layout(pp=2, microbatches=2)):
        with without_values():
            of = costs.predict(layout)
        times = step_times(
            gpt(), x, of, y=x, loss=pc.cross_entropy, steps=1,
            arguments={"tp": PLAN, "pp": "blocks"}, around=lambda mesh: Paced(rate, mesh),
        )  # fmt: skip
        assert min(times) >= 0.99 * of.seconds, layout
