"""Shares of other numbers of samples, compared with traces of their own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny_gpt import GPT, PLAN

from pycoll import parallel as pc
from pycoll import topology
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.layouts import Layout
from pycoll.parallel.planner.pieces import Share
from pycoll.parallel.planner.sizes import Cut, Sizes, between
from pycoll.parallel.planner.trace import Operator, without_values

pytestmark = [pytest.mark.pure, pytest.mark.timeout(120)]

BATCH = 24
CLUSTER = topology.loads("""
[[level]]
name = "host"
size = 8
link_gb_per_s = 1.0
[device]
name = "fast"
compute_tflop_per_s = 1
memory_gb_per_s = 100
""")


def costs() -> CostModel:
    tokens = torch.zeros(BATCH, 8, dtype=torch.int64)
    return CostModel(
        GPT(fused=True), tokens, CLUSTER, y=tokens, loss=pc.cross_entropy, tp=PLAN, blocks="blocks"
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(recompute="full"),
        Layout(tp=2, sequence_parallel=True),
        Layout(cp=4, tp=2, recompute="full"),
    ],
    ids=str,
)
def test_shares_made_from_two_traces_equal_a_trace(layout):
    """Three traces for each kind of layout: two seconds in total."""
    with without_values():
        model = costs()
        for size in (2, 3, 6):
            model.pieces(pc.Layout(**{**sizes_of(layout), "microbatches": BATCH // size}))
        (traced,) = model._sizes._traced.values()
    assert between(traced, (2, 3), 6) == traced[6]
    assert list(model._sizes._is_even.values()) == [True]


def sizes_of(layout: Layout) -> dict:
    return {name: getattr(layout, name) for name in Layout.__slots__}


def share(flops: int) -> Share:
    event = Operator("aten.mm", frozenset(), "forward", flops, 8)
    return Share({"first": [event]}, {"first": 0}, {}, 0)


def test_shares_are_traced_until_one_was_made_as_it_is_traced():
    """Even costs are traced for two sizes and compared for a third; others are always traced."""
    cut, asked = Cut(1, 1, 1, False, None), []

    def trace(size: int, power: int) -> Share:
        asked.append(size)
        return share(size**power)

    for power, traced in ((1, [1, 2, 4, 8]), (2, [1, 2, 4, 8, 16, 32])):
        sizes, asked = Sizes(), []
        for size in (1, 2, 4, 8, 16, 32):
            assert sizes.share(cut, size, partial(trace, size, power)) == share(size**power)
        assert asked == traced


def test_shares_expected_to_be_traced_are_those_that_even_costs_need():
    cuts = [Cut(tp, 1, 1, False, None) for tp in (2, 4)]
    asked = [(cut, size) for cut in cuts for size in (1, 2, 4, 8, 16)]
    sizes, traced = Sizes(), []

    def trace(cut: Cut, size: int) -> Share:
        traced.append((cut, size))
        return share(size)

    for cut, size in asked[:1]:
        sizes.share(cut, size, partial(trace, cut, size))
    expected = list(sizes.expected(asked))
    for cut, size in asked[1:]:
        sizes.share(cut, size, partial(trace, cut, size))
    assert expected == traced[1:]
    assert traced == [*asked[:4], *asked[5:8]]
