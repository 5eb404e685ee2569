"""Which operators run a second time for backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny_gpt import GPT, batches
from torch.utils._python_dispatch import TorchDispatchMode

from pycoll import parallel as pc
from pycoll import run_ranks


class Operators(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(comm, recompute):
    mesh = pc.mesh(dp=1, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(depth=2)
    model = pc.parallelize(model, mesh, pp="blocks", recompute=recompute)
    x, y = next(batches(1, 4))
    model.step(x, y, loss=pc.cross_entropy)  # the first one makes buckets
    pc.trainer_of(model).clear()
    with Operators() as operators:
        model.step(x, y, loss=pc.cross_entropy)
    return operators.calls


def test_selective_recomputation_keeps_products_with_weights():
    """Per block: 4 linear layers, 2 products of attention, a softmax, and a GELU."""

    def work(comm):
        none, full, selective, keeping = (
            calls_of_a_step(comm, which)
            for which in (None, "full", "selective", pc.Keep(("aten.bmm",), "blocks.1"))
        )
        assert full["aten.addmm"] > none["aten.addmm"] == selective["aten.addmm"] > 0
        for operator, number in (("aten.bmm", 4), ("aten._softmax", 2), ("aten.gelu", 2)):
            assert selective[operator] == none[operator] + number == full[operator], operator
        assert keeping["aten.bmm"] == none["aten.bmm"]
        assert keeping["aten._softmax"] == none["aten._softmax"] + 1

    run_ranks(work, 1)


@pytest.mark.pure
def test_memory_counts_the_results_that_are_kept():
    """A block keeps the results of its products with weights."""
    x = torch.zeros(2, 8, dtype=torch.int64)

    def kept(which, **gpt):
        model = GPT(drop=0.0, depth=2, **gpt)
        return pc.memory(model, {"dp": 1}, pp="blocks", recompute=which, x=x)[0].activations

    none, full, selective = (kept(which) for which in (None, "full", "selective"))
    assert selective - full == 2 * 16 * (3 + 1 + 4 + 1) * 16 * 4  # qkv, out, up, down
    assert full < selective < none
    one = pc.Keep(("aten.addmm",), "blocks.1")
    of_one = kept(pc.Keep((), "blocks.1"))
    assert kept(one) - of_one == (selective - full) // 2
