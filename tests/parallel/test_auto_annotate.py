"""Annotations that are found: the plan of Megatron-LM, and the least of all choices."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_annotate import MLP, SHAPES, TWO, AttentionBlock, ConvNet, X
from tiny_gpt import Blocks
from torch import nn

from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.parallel.features.annotate.annotations import specs_of
from pycoll.parallel.features.annotate.graph import trace
from pycoll.parallel.tools.auto_annotate import options, sent_bytes

pytestmark = pytest.mark.pure


def test_found_annotations_of_a_block_are_the_plan_of_megatron():
    found = pc.auto_annotate(Blocks(1), X, ranks=2)
    assert dict(found.placements) == {
        "blocks.0.qkv.weight": ("tp:3", None),
        "blocks.0.up.weight": ("tp", None),
    }
    by_hand = pc.annotate(TWO, X).plan(Blocks(1), 2)
    assert found.plan(Blocks(1), 2).nbytes == by_hand.nbytes


@pytest.mark.parametrize("kind", [MLP, ConvNet, AttentionBlock])
def test_found_annotations_send_no_more_than_any_choice_of_dimensions(kind):
    """All combinations of dimensions of the weights that the search has annotated."""
    x = torch.zeros(4, *SHAPES[kind])
    model = kind()
    graph, _ = trace(model, model.forward, specs_of(model), (x,), {})
    found = pc.auto_annotate(model, x, ranks=2)
    values = {name: value for value, name in graph.states.items()}
    annotated = [values[name] for name in found.placements]
    costs = [
        sent_bytes(graph, dict(zip(annotated, cuts, strict=True)), 2)
        for cuts in itertools.product(*(options(graph, value, 2) for value in annotated))
    ]
    cuts = found.shard(model, graph, 2).cuts
    assert all(value in cuts for value in values.values() if graph.fakes[value].dim() > 1)
    assert sent_bytes(graph, {v: cuts[v] for v in annotated}, 2) == min(costs) and len(costs) > 3


def test_weights_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="no weight of Linear has a dimension that divides among"):
        pc.auto_annotate(nn.Linear(3, 5), torch.zeros(2, 3), ranks=7)
