"""PipeDream with several ranks for each stage: order, staleness, and one process's results."""

from __future__ import annotations

import math

import pytest
import torch
from mesh_cases import differences, in_one_world
from models import ranks
from torch import nn
from torch.nn import functional

from pycoll import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.schedules.pipedream import round_robin, staleness_of
from pycoll.parallel.pipeline.schedules.simulate_pipeline import peak_live, simulate
from pycoll.parallel.pipeline.schedules.validate import validate

SHAPES = [(3, 1), (1, 2), (2, 2), (2, 1, 3)]


@pytest.mark.pure
@pytest.mark.parametrize("replicas", [*SHAPES, (1, 1, 1, 1), (4,)])
def test_replicas_take_turns_and_admit_what_noam_says(replicas):
    m = 2 * math.lcm(*replicas)
    schedule = round_robin(replicas, m)
    validate(schedule)
    noam = math.ceil(sum(replicas) / replicas[0])
    for rank, order in enumerate(schedule.orders):
        (stage,) = schedule.stages_of(rank)
        own = [a.microbatch for a in order if a.kind is pipeline.Kind.F]
        assert own == list(range(rank - schedule.placement[stage], m, replicas[stage]))
        live = min(len(own), staleness_of(replicas, stage) + 1)
        assert peak_live(order) == live
        assert stage or live == min(len(own), noam)
    if set(replicas) == {1}:
        assert schedule.orders == pipeline.build("pipedream", len(replicas), m).orders


@pytest.mark.pure
def test_replicas_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"4 microbatches and replicas \(3, 1\): expected numbers"):
        round_robin((3, 1), 4)
    schedule = round_robin((2, 1), 4)
    orders = [list(order) for order in schedule.orders]
    orders[0] = [a for a in orders[0] if a.kind is not pipeline.Kind.U]  # the other one waits
    with pytest.raises(UsageError, match="rank 0 has 0F0, 0B0 for stage 0 and microbatch 0"):
        validate(
            pipeline.Schedule("mine", 4, schedule.placement, tuple(map(tuple, orders)), (2, 1))
        )
    swapped = [tuple(reversed(order)) for order in schedule.orders]
    with pytest.raises(UsageError, match="rank 0 has 0U2 before 0B2"):
        validate(pipeline.Schedule("mine", 4, schedule.placement, tuple(swapped), (2, 1)))


@pytest.mark.pure
def test_slow_stage_with_three_ranks_takes_a_third_of_the_time():
    """The time between two microbatches is that of the slowest stage, over its ranks."""
    short, long = (simulate(round_robin((3, 1), m), stage_scale=[3.0, 1.0]).time for m in (30, 90))
    assert (long - short) / 60 == pytest.approx(3.0, rel=0.01)


def layers(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(1)
    widths = [6, *[8] * (num_stages - 1), 3]
    return [
        nn.Sequential(nn.Linear(a, b), nn.Tanh()).double()
        for a, b in zip(widths, widths[1:], strict=False)
    ]


def loss_of(output, target):
    return functional.cross_entropy(output, target)


def train(comm, replicas: tuple, m: int, lr=0.1) -> dict:
    """A stream of microbatches; losses, weights of this rank's stage, and its staleness."""
    schedule = round_robin(replicas, m)
    (stage,) = schedule.stages_of(comm.rank)
    module = layers(len(replicas))[stage]
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)

    def update(stage: int, microbatch: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    stages = pipeline.ModuleStages({stage: module}, len(replicas))
    runtime = pipeline.PipelineRuntime(
        stages, "pipedream", comm, replicas=replicas, update=update, loss_fn=loss_of
    )
    x, y = data(m)
    result = runtime.step(list(x), list(y), scale=1 / 4)
    evaluated = runtime.evaluate(list(x), list(y))
    return {
        "stage": stage,
        "loss": result.loss,
        "evaluated": evaluated.loss,
        "weights": {name: p.detach() for name, p in module.named_parameters()},
        "staleness": result.staleness,
    }


def data(m: int):
    random = torch.Generator().manual_seed(2)
    x = torch.randn(m, 4, 6, generator=random, dtype=torch.float64)
    return x, torch.randint(3, (m, 4), generator=random)


def alone(replicas: tuple, m: int, lr=0.1) -> tuple[float, float, list]:
    """One process that computes each stage's gradients from weights of the stated age."""
    modules = layers(len(replicas))
    steps = [torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5) for module in modules]
    versions = [[copy_of(module)] for module in modules]
    x, y = data(m)
    total = 0.0
    for i in range(m):
        hidden, used = x[i], []
        for stage, module in enumerate(modules):
            turn = i // replicas[stage]
            version = versions[stage][turn - min(turn, staleness_of(replicas, stage))]
            used.append({name: p.clone().requires_grad_() for name, p in version.items()})
            hidden = torch.func.functional_call(module, used[-1], (hidden,))
        loss = loss_of(hidden, y[i])
        loss.backward()
        total += float(loss.detach())
        for stage, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                gradient = used[stage][name].grad / replicas[stage]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if (i + 1) % replicas[stage] == 0:
                steps[stage].step()
                steps[stage].zero_grad()
                versions[stage].append(copy_of(module))
    with torch.no_grad():
        after = sum(float(loss_of(nn.Sequential(*modules)(x[i]), y[i])) for i in range(m)) / m
    return total / m, after, [copy_of(module) for module in modules]


def copy_of(module: nn.Module) -> dict:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_training_with_replicas_is_that_of_stale_weights_on_one_process():
    cases = [(sum(replicas), replicas, 4 * math.lcm(*replicas)) for replicas in SHAPES]
    for (_, replicas, m), found in zip(cases, in_one_world(train, cases), strict=True):
        loss, evaluated, weights = alone(replicas, m)
        for rank, got in enumerate(found):
            stage = got["stage"]
            expected = {"loss": loss, "evaluated": evaluated, "weights": weights[stage]}
            wrong = list(differences(expected, {key: got[key] for key in expected}))
            assert not wrong, (replicas, rank, wrong)
            stated = staleness_of(replicas, stage)
            assert got["staleness"] == {
                (stage, i): min(i // replicas[stage], stated) for _, i in got["staleness"]
            }
        assert all(len(got["staleness"]) == m // replicas[got["stage"]] for got in found)


def digits(comm, replicas: tuple[int, ...], epochs: int) -> float:
    """The share of digits of the test set that are classified correctly."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 10)]
    if len(replicas) == 1:
        modules = [nn.Sequential(*modules)]
    (stage,) = round_robin(replicas, math.lcm(*replicas)).stages_of(comm.rank)
    optimizer = torch.optim.AdamW(modules[stage].parameters(), lr=3e-3)

    def update(stage: int, microbatch: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    runtime = pipeline.PipelineRuntime(
        pipeline.ModuleStages({stage: modules[stage]}, len(replicas)),
        "pipedream", comm, replicas=replicas, update=update, loss_fn=loss_of,
    )  # fmt: skip
    for _ in range(epochs):
        runtime.step(list(x[:1200].split(25)), list(y[:1200].split(25)), scale=1 / 25)

    def wrong(output, target):
        return (output.argmax(1) != target).sum().double(), len(target)

    left = x[1200:1797].split(199), y[1200:1797].split(199)
    return 1 - runtime.evaluate(list(left[0]), list(left[1]), loss_fn=wrong).loss


@pytest.mark.slow
def test_digits_on_three_replicas_and_one_reach_the_accuracy_of_one_process():
    pytest.importorskip("sklearn")
    (one, *_), (several, *_) = (ranks(digits, sum(of), of, 10) for of in ((1,), (3, 1)))
    print(f"one process {one:.3f}, replicas 3 and 1 {several:.3f}")
    assert one > 0.93 and several >= one - 0.02
