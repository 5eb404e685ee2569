"""Plans: their memory, their searches, what they refuse, and what they apply."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_gpt import GPT, PLAN

from pycoll import UsageError, run_ranks, topology
from pycoll import parallel as pc
from pycoll.parallel.planner.cost import CostModel
from pycoll.parallel.planner.layout_space import LayoutSpace
from pycoll.parallel.planner.trace import without_values

CLUSTER = topology.load(
    Path(__file__).resolve().parents[3] / "examples" / "topologies" / "a100_hosts.toml"
)
FEW = pc.Choices(zero=(0, 1), axes=("dp", "tp", "pp"), sequence_parallel=(False,))


def gpt(dim=32, depth=4, heads=4) -> GPT:
    with torch.device("meta"):
        return GPT(vocab=64, dim=dim, depth=depth, heads=heads, context=16, fused=True, drop=0)


def tokens(samples: int) -> torch.Tensor:
    return torch.zeros(samples, 16, dtype=torch.int64, device="meta")


def cost_model(samples: int = 8) -> CostModel:
    return CostModel(gpt(), tokens(samples), CLUSTER, tp=PLAN, blocks="blocks")


@pytest.mark.pure
def test_memory_of_layouts_is_that_of_pc_memory():
    layouts = [
        pc.Layout(dp=2, zero=1, microbatches=2),
        pc.Layout(dp=2, tp=2, zero=3, microbatches=1),
        pc.Layout(tp=2, recompute="full", microbatches=2),
        pc.Layout(pp=2, dp=2, microbatches=4),
        pc.Layout(pp=2, schedule="interleaved_1f1b", microbatches=4),
    ]
    costs = cost_model()
    for layout in layouts:
        with without_values():
            found = costs.predict(layout)
        size = 8 // layout.dp // layout.microbatches
        ranks = pc.memory(
            gpt(),
            layout.sizes,
            tp=PLAN,
            pp="blocks",
            schedule=layout.schedule,
            zero=layout.zero,
            recompute=layout.recompute,
            costs=found.stages,
            x=torch.zeros(size, 16, dtype=torch.int64),
            microbatches=layout.microbatches,
        )
        assert found.memory == pytest.approx(max(rank.total for rank in ranks), rel=0.01), layout


@pytest.mark.pure
@pytest.mark.slow
def test_dynamic_programming_finds_the_ten_layouts_of_all():
    """Five seconds: every layout is simulated."""
    costs = cost_model()
    with without_values():
        every = LayoutSpace(costs, 8, 10**9, FEW)
        best = min(map(every.cost, every.points()))
        few = LayoutSpace(costs, 8, 10**9, FEW)
        found = few.best()
        assert found is not None and few.cost(found) == best
    assert [of.seconds for of in few.ranked()[:10]] == [of.seconds for of in every.ranked()[:10]]
    assert len(few.known) < len(every.known)


@pytest.mark.pure
def test_rings_of_many_ranks_are_traced_as_if_every_step_ran(monkeypatch):
    from pycoll.parallel.core.ledger import Ledger
    from pycoll.parallel.planner.trace import TracedLedger

    layout = pc.Layout(cp=8, microbatches=2)
    with without_values():
        short = cost_model().pieces(layout)
        monkeypatch.setattr(TracedLedger, "hops", Ledger.hops)
        every = cost_model().pieces(layout)
    sent = [count for calls in short.blocks[0].forward_calls.items() for count in calls[1:]]
    assert sent == [7 * 2]  # keys and values to the next rank
    for a, b in zip(short.blocks, every.blocks, strict=True):
        assert a.operators == b.operators and a.backward_calls == b.backward_calls
        assert a.forward_calls == b.forward_calls and a.kept == b.kept


@pytest.mark.pure
def test_bounds_of_traced_models_are_below_their_predictions():
    """A second: bounds without a trace are compared with traces of other shares."""
    costs = cost_model()
    layouts = [
        pc.Layout(dp=2, cp=2, microbatches=2, zero=1),
        pc.Layout(cp=4, microbatches=2, recompute="full"),
        pc.Layout(pp=2, cp=2, tp=2, microbatches=4, sequence_parallel=True),
        pc.Layout(pp=2, tp=2, microbatches=4, schedule="interleaved_1f1b", recompute="full"),
    ]
    with without_values():
        for layout in layouts:
            found, fine = costs.predict(layout), costs.bound(layout)
            coarse = costs.untraced_bound(layout)
            assert 0 < coarse[0] <= fine[0] <= found.seconds, layout
            assert 0 < coarse[1] <= fine[1] <= found.memory, layout


@pytest.mark.pure
def test_long_pipelines_are_extrapolated_to_their_simulated_time(monkeypatch):
    from pycoll.parallel.planner import step

    costs = cost_model(samples=64)
    layouts = [
        pc.Layout(pp=4, microbatches=64),
        pc.Layout(pp=2, microbatches=64, schedule="interleaved_1f1b"),
    ]
    with without_values():
        for layout in layouts:
            short = costs.predict(layout).seconds
            monkeypatch.setattr(step, "_STEADY", 1000)
            assert short == pytest.approx(costs.predict(layout).seconds, rel=1e-6), layout
            monkeypatch.undo()


@pytest.mark.pure
@pytest.mark.slow
def test_large_models_leave_data_parallelism():
    """More width makes the size of dp in the best layout fall. Ten seconds: three plans."""
    options = {"world": 8, "cluster": CLUSTER, "tp": PLAN, "choices": FEW, "moments": 2}
    memory = 6_000_000
    shares = [
        pc.plan(gpt(dim), tokens(8), memory=memory, **options).sizes["dp"] for dim in (16, 64, 96)
    ]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1], shares


@pytest.mark.pure
def test_a_plan_shows_its_layouts_and_why_others_lost():
    plan = pc.plan(gpt(), tokens(8), world=4, cluster=CLUSTER, tp=PLAN, choices=FEW)
    assert plan.sizes["dp"] == 4 and plan.microbatches == plan.best[0].layout.microbatches
    assert set(plan) >= {"tp", "pp", "schedule", "zero", "recompute", "costs"}
    text = plan.table()
    assert "ms/step" in text and "\n  tp x pp: " in text and " times as long: " in text
    for of in plan.best:
        assert of.seconds == pytest.approx(of.compute_s + of.bubble_s + of.exposed_s)
        assert of.memory <= plan.memory


@pytest.mark.pure
def test_plans_that_cannot_be_are_refused_with_what_would_fit():
    def plan(**options):
        arguments = {"world": 4, "cluster": CLUSTER, "tp": PLAN, "choices": FEW, **options}
        return pc.plan(arguments.pop("model", gpt()), tokens(8), **arguments)

    with pytest.raises(UsageError, match=r"no layout of 4 ranks fits into 1e-05 GB a rank: the sm"):
        plan(memory=10_000)
    with pytest.raises(UsageError, match="search is 'magic', expected one of exhaustive, dp"):
        plan(search="magic")
    with pytest.raises(UsageError, match=r"has no device: add a table \[device\]"):
        plan(cluster=topology.uniform(4, latency_s=1e-6, link_bytes_per_s=1e9))
    only_tp = pc.Choices(axes=("tp",), zero=(0,), sequence_parallel=(False,))
    with pytest.raises(UsageError, match="its heads = 3 does not divide among tp=4 ranks"):
        plan(model=gpt(dim=24, heads=3), choices=only_tp)


def train(comm) -> tuple[dict[str, int], float]:
    torch.manual_seed(3)
    model = GPT(vocab=64, dim=32, depth=4, heads=4, context=16, fused=True, drop=0)
    x = torch.arange(128).view(8, 16) % 64
    plan = pc.plan(model, x, world=comm.size, cluster=CLUSTER, tp=PLAN, choices=FEW)
    mesh = pc.mesh(**plan.sizes, comm=comm)
    placed = pc.parallelize(model, mesh, **plan)
    batch = next(iter(pc.shard([(x, x)], mesh)))
    out = placed.step(*batch, loss=pc.cross_entropy, microbatches=plan.microbatches)
    return plan.sizes, out.loss


def test_a_plan_is_what_parallelize_takes():
    """Plans on each rank are equal, and the step has the loss of one process."""
    (_, alone), *_ = run_ranks(train, 1)
    for sizes, loss in run_ranks(train, 2):
        assert math.prod(sizes.values()) == 2
        assert loss == pytest.approx(alone, abs=1e-5)
