"""The runtime against one process, in float64: every schedule, odd batches, tied weights."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from mesh_cases import covering, differences, in_one_world
from models import batch, gpt, loss_sum, ranks, train_alone
from tiny_gpt import GPT
from torch import nn

from pycoll.parallel import pipeline
from pycoll.parallel.core.transfers import Transfers
from pycoll.parallel.pipeline.schedules.simulate_pipeline import peak_versions
from pycoll.parallel.pipeline.shared import sum_shared_gradients
from pycoll.parallel.pipeline.stash import Stash

FLUSHING = [name for name in pipeline.names() if pipeline.generator(name).staleness is None]
STREAMS = [name for name in pipeline.names() if name not in FLUSHING]


def stages_of(name: str) -> int:
    return (pipeline.generator(name).allowed_stages or (1, 2))[-1]


def made(shapes: tuple) -> list:
    return [batch(n, length, seed=i) for i, (n, length) in enumerate(shapes)]


@functools.cache
def alone(shapes: tuple, depth: int, tied: bool = False) -> tuple:
    """One process: losses and weights."""
    model = gpt(depth=depth, tied=tied)
    losses = train_alone(model, made(shapes))
    named = model.named_parameters(remove_duplicate=False)
    return losses, {name: weight.detach() for name, weight in named}


def train(
    comm, schedule, shapes, *, depth, m, v=1, tied=False, split_on=None, **options
) -> dict[str, Any]:
    """Trains the cut GPT; returns differences from one process and figures of the last step."""
    model = gpt(depth=depth, tied=tied)
    placed = schedule
    if isinstance(schedule, str):
        placed = pipeline.build(schedule, comm.size, m, v)
    cut = pipeline.cut(model, "blocks", placed.num_stages, placed.stages_of(comm.rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options["split_backward"] = split_on in (None, comm.rank)
    runtime = pipeline.PipelineRuntime(cut, schedule, comm, loss_fn=loss_sum, **options)
    losses = []
    for x, y in made(shapes):
        optimizer.zero_grad()
        result = runtime.step(x, y, microbatches=m, scale=1 / y.numel())
        optimizer.step()
        losses.append(result.loss)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected_losses, expected = alone(shapes, depth, tied)
    here = {name: expected[name] for name in weights}
    return {
        "wrong": list(differences([expected_losses, here], [losses, weights])),
        "names": set(weights),
        "shared": dict(cut.shared),
        "tied": weights.get("token.weight", weights.get("head.weight")),
        "live": result.peak_live,
        "sent": result.sent_bytes,
        "messages": len([m for m in comm.message_record() if m["kind"] == "send"]),
    }


def assert_parity(cases: list[tuple]) -> list[list[dict]]:
    """Each case `(n, schedule, shapes, options)` trains as one process does; all in one world."""
    for _, _, shapes, options in cases:
        alone(shapes, options["depth"], options.get("tied", False))  # before the ranks are forked
    work = lambda comm, schedule, shapes, options: train(comm, schedule, shapes, **options)  # noqa: E731
    outcomes = in_one_world(work, cases)
    for (_, schedule, _, options), found in zip(cases, outcomes, strict=True):
        wrong = [f"rank {rank}: {text}" for rank, got in enumerate(found) for text in got["wrong"]]
        assert not wrong, (schedule, options, wrong)
        names = {name for name, _ in gpt(depth=options["depth"]).named_parameters()}
        assert set().union(*(got["names"] for got in found)) >= names - {"head.weight"}
    return outcomes


def assert_live(cases: list[tuple], outcomes: list[list[dict]]) -> None:
    for (p, name, _, options), found in zip(cases, outcomes, strict=True):
        row, m, v = pipeline.generator(name), options["m"], options["v"]
        assert [got["live"] for got in found] == [row.live(p, m, v, rank) for rank in range(p)]


def test_training_by_schedule_is_that_of_one_process():
    shapes = ((6, 4),) * 2
    cases = []
    for name, (p, m) in itertools.product(FLUSHING, ((2, 3), (4, 1), (4, 6))):
        v = stages_of(name)
        depth = 2 * p if v == 2 else p + 1
        cases.append((p, name, shapes, {"v": v, "m": m, "depth": depth}))
    assert_live(cases, assert_parity(cases))


@pytest.mark.slow
def test_every_pair_of_schedule_ranks_microbatches_and_ties_is_that_of_one_process():
    values = {"name": FLUSHING, "p": (2, 3, 4, 8), "m": (1, 4, 6), "tied": (False, True)}
    cases = []
    for row in covering(values, lambda row: True, lambda row: 1):
        v = stages_of(row["name"])
        options = {"v": v, "m": row["m"], "tied": row["tied"], "depth": v * row["p"]}
        cases.append((row["p"], row["name"], ((6, 4),) * 4, options))
    assert_live(cases, assert_parity(cases))


def test_tied_weights_stay_tied_and_equal():
    names = ("gpipe", "interleaved_1f1b", "zbv")
    stages = {name: pipeline.generator(name).default_stages for name in names}
    cases = [
        (2, name, ((8, 6),) * 3, {"v": v, "m": 4, "depth": 4, "tied": True})
        for name, v in stages.items()
    ]
    for (first, second), (name, v) in zip(assert_parity(cases), stages.items(), strict=True):
        assert first["shared"] == {"token.weight": (0, 2 * v - 1)}
        if name != "zbv":  # where one rank has both
            assert torch.equal(first["tied"], second["tied"])


def test_uneven_batches_changing_lengths_and_custom_schedules_are_those_of_one_process():
    """Tags say what a message is: in the first text, stage 1 begins with what is sent last."""
    shapes = ((7, 6), (7, 6), (2, 6), (5, 9), (7, 6), (1, 3), (8, 6))
    order = pipeline.Schedule.from_text("0F0 0F1 0F2 0B1 0B0 0B2\n1F2 1F0 1F1 1B0 1B2 1B1")
    split = pipeline.Schedule.from_text("0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1B0 1F1 1I1 1W1")
    assert_parity(
        [
            (3, "1f1b", shapes, {"m": 3, "depth": 4}),
            (3, "zb1p", shapes, {"m": 3, "depth": 4}),
            (2, order, ((5, 6),) * 3, {"m": 3, "depth": 2}),
            (2, split, ((4, 6),) * 2, {"m": 2, "depth": 2, "split_on": 0}),
        ]
    )


class Scaled(GPT):
    """A weight of the model itself, which every stage uses."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.scale = nn.Parameter(torch.full((16,), 0.7))

    def forward(self, tokens):
        x = self.token(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


def test_weight_of_the_model_itself_has_the_same_bits_on_all_stages():
    x, y = batch(6)

    def rank(comm):
        mine = gpt(Scaled, 3)
        cut = pipeline.cut(mine, "blocks", 3, [comm.rank])
        runtime = pipeline.PipelineRuntime(cut, "1f1b", comm, loss_fn=loss_sum)
        runtime.step(x, y, microbatches=3)
        return mine.scale.grad

    reference = gpt(Scaled, 3)
    loss_sum(reference(x), y)[0].backward()
    found = ranks(rank, 3)
    assert torch.allclose(found[0], reference.scale.grad, atol=1e-10, rtol=0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_shared_sums_are_made_in_the_order_of_ranks():
    """The order of the three addends matters to the last bit."""
    addends = [1e16, 1.0, -1e16]  # in this order 0, in others 1

    class Holder:
        shared = {"w": (0, 1, 2)}

        def __init__(self, value: float) -> None:
            self.weight = nn.Parameter(torch.zeros(1).double())
            self.weight.grad = torch.full((1,), value, dtype=torch.float64)

        def shared_parameter(self, name: str) -> nn.Parameter:
            return self.weight

    def rank(comm):
        holder = Holder(addends[comm.rank])
        sum_shared_gradients(holder, (0, 1, 2), Transfers(comm), {})
        return float(holder.weight.grad)

    assert ranks(rank, 3) == [0.0] * 3


def test_evaluation_gives_loss_and_outputs_without_gradients():
    x, y = batch(6)

    def rank(comm):
        model = gpt(depth=4)
        cut = pipeline.cut(model, "blocks", 4, [comm.rank, comm.rank + 2])
        runtime = pipeline.PipelineRuntime(cut, "interleaved_1f1b", comm, loss_fn=loss_sum)
        trained = runtime.step(x, y, microbatches=3)
        model.zero_grad()
        result = runtime.evaluate(x, y, microbatches=3)
        outputs = runtime.evaluate(x, microbatches=3).outputs
        assert all(p.grad is None for p in model.parameters())
        assert result.loss == trained.loss
        return result.loss, outputs

    model = gpt(depth=4)
    total, count = loss_sum(model(x), y)
    got = ranks(rank, 2)
    assert [loss for loss, _ in got] == pytest.approx([float(total.detach()) / count] * 2, 1e-12)
    assert got[0][1] == {}
    logits = torch.cat([got[1][1][i] for i in range(3)])
    assert torch.allclose(logits, model(x), atol=1e-12, rtol=0)


def test_gradients_are_added_in_place_and_stages_report_once_all_is_there():
    x, y = batch(4)

    def rank(comm):
        model = gpt(depth=4, tied=True)
        cut = pipeline.cut(model, "blocks", 4, [comm.rank, comm.rank + 2])
        told: list = []
        runtime = pipeline.PipelineRuntime(
            cut,
            "zb1p",
            comm,
            loss_fn=loss_sum,
            on_weight_grad_ready=lambda stage: told.append(("ready", stage)),
            on_microbatch=lambda i: told.append(i),
        )
        buffers = {}
        for name, parameter in model.named_parameters():
            parameter.grad = buffers[name] = torch.ones_like(parameter)
        runtime.step(x, y, microbatches=2)
        assert all(p.grad is buffers[name] for name, p in model.named_parameters())
        ready = [item[1] for item in told if isinstance(item, tuple)]
        numbers = [item for item in told if not isinstance(item, tuple)]
        assert sorted(numbers) == [0] * 6 + [1] * 6  # two stages, F I W
        return ready, {name: grad - 1 for name, grad in buffers.items()}

    reference = gpt(depth=4, tied=True)
    loss_sum(reference(x), y)[0].backward()
    expected = dict(reference.named_parameters(remove_duplicate=False))
    outcomes = ranks(rank, 2)
    assert [ready for ready, _ in outcomes] == [[2, 0], [3, 1]]
    for _, gradients in outcomes:
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name].grad, atol=1e-12, rtol=0), name


def test_bytes_sent_are_activations_once_per_cut_and_direction():
    """The ledger: b s h per cut and direction, nothing else; shapes are announced once."""
    (found,) = assert_parity([(4, "1f1b", ((8, 6),) * 3, {"m": 4, "depth": 4})])
    one_way = 8 * 6 * 16 * 8  # samples, length, dim, bytes
    assert [got["sent"] for got in found] == [one_way, 2 * one_way, 2 * one_way, one_way]
    # Four microbatches in three steps, and an announcement of two messages in the first.
    assert [got["messages"] for got in found] == [12 + 8, 24 + 8, 24 + 8, 12]


def kept(order, versions) -> int:
    """Most versions that a stash keeps while an order is done."""
    weight = torch.nn.Parameter(torch.zeros(1))
    stash = Stash({"weight": weight}, versions)
    for action in order:
        if action.kind is pipeline.Kind.F:
            stash.forward(action.microbatch)
        elif action.kind is pipeline.Kind.B:
            stash.backward(action.microbatch)
        else:
            stash.updated()
    return stash.peak_versions


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("m", [1, 2, 5, 9, 20])
def test_as_many_versions_are_kept_as_stated(name, m):
    schedule = pipeline.build(name, 4, m)
    peaks = [peak_versions(order, schedule.versions) for order in schedule.orders]
    assert peaks == [kept(order, schedule.versions) for order in schedule.orders]
    if m == 20:
        stated = {"pipedream_2bw": [2] * 4, "pipedream_vertical_sync": [4] * 4}
        assert peaks == stated.get(name, [4, 3, 2, 1])
