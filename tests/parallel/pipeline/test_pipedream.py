"""PipeDream: the weights of one process that keeps all versions."""

from __future__ import annotations

import pytest
import torch
from models import batch, gpt, loss_sum, ranks

from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.schedules.simulate_pipeline import peak_versions
from pycoll.parallel.pipeline.stash import Stash

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

TOLERANCE = 1e-10


def pipedream_alone(num_stages: int, batches: list, lr: float) -> tuple:
    """One process that keeps every version of every stage: the definition of weight stashing."""
    model = gpt(depth=num_stages)
    cut = pipeline.cut(gpt(depth=num_stages), "blocks", num_stages, range(num_stages))
    names = [list(cut.parameters_of(stage)) for stage in range(num_stages)]
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    versions = [[{n: first[n] for n in of}] for of in names]
    losses = []
    for i, (x, y) in enumerate(batches):
        used = {}
        for stage, of in enumerate(versions):
            stale = min(i, num_stages - 1 - stage)
            used |= {n: w.clone().requires_grad_() for n, w in of[i - stale].items()}
        total, count = loss_sum(torch.func.functional_call(model, used, (x,)), y)
        total.backward()
        losses.append(float(total.detach()) / count)
        for of in versions:
            of.append({n: w - lr * used[n].grad for n, w in of[-1].items()})
    return losses, {n: w for of in versions for n, w in of[-1].items()}


@pytest.mark.parametrize("p", [2, 4])
def test_pipedream_is_that_of_one_process_with_all_versions(p):
    batches = [batch(2, seed=s) for s in range(10)]
    lr = 0.01

    def rank(comm):
        model = gpt(depth=p)
        cut = pipeline.cut(model, "blocks", p, [comm.rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def update(stage: int, microbatch: int) -> None:
            optimizer.step()
            optimizer.zero_grad()

        runtime = pipeline.PipelineRuntime(cut, "pipedream", comm, update=update)
        losses: list[float] = []

        def loss_fn(out, y):
            made = loss_sum(out, y)
            losses.append(float(made[0].detach()) / made[1])
            return made

        result = runtime.step([x for x, _ in batches], [y for _, y in batches], loss_fn=loss_fn)
        weights = {name: w.detach() for name, w in model.named_parameters()}
        return losses, weights, result.staleness, result.peak_live

    outcomes = ranks(rank, p)
    losses, expected = pipedream_alone(p, batches, lr)
    assert outcomes[-1][0] == pytest.approx(losses, abs=TOLERANCE)
    for stage, (_, weights, staleness, peak) in enumerate(outcomes):
        assert staleness == {(stage, i): min(i, p - 1 - stage) for i in range(len(batches))}
        assert peak == p - stage
        for name, weight in weights.items():
            assert (weight - expected[name]).abs().max() <= TOLERANCE, name


def kept(order) -> int:
    """What stashes keep while an order is done."""
    weight = torch.nn.Parameter(torch.zeros(1))
    stash = Stash({"weight": weight})
    for action in order:
        if action.kind is pipeline.Kind.F:
            stash.forward(action.microbatch)
        elif action.kind is pipeline.Kind.B:
            stash.backward(action.microbatch)
        else:
            stash.updated()
    return stash.peak_versions


@pytest.mark.parametrize("m", [1, 2, 5, 9])
def test_as_many_versions_are_kept_as_stated(m):
    for order in pipeline.build("pipedream", 4, m).orders:
        assert peak_versions(order) == kept(order)
