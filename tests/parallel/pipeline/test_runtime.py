"""The runtime against one process, in float64: every schedule, odd batches, tied weights."""

from __future__ import annotations

import pytest
import torch
from models import GPT, batch, gpt, loss_sum, ranks, train_alone
from torch import nn

from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.shared import sum_shared_gradients

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

FLUSHING = [name for name in pipeline.names() if name != "pipedream"]
TOLERANCE = 1e-10


def stages_of(name: str) -> tuple[int, ...]:
    return pipeline.generator(name).allowed_stages or (1, 2)


def train(comm, name, batches, *, v=1, m=4, depth=8, tied=False, **options) -> tuple:
    """Trains the cut GPT: the losses, the weights that are here, the last step's result."""
    model = gpt(depth=depth, tied=tied)
    schedule = pipeline.build(name, comm.size, m, v)
    cut = pipeline.cut(model, "blocks", schedule.num_stages, schedule.stages_of(comm.rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runtime = pipeline.PipelineRuntime(cut, name, comm, loss_fn=loss_sum, **options)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        result = runtime.step(x, y, microbatches=m, scale=1 / y.numel())
        optimizer.step()
        losses.append(result.loss)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, weights, result, dict(cut.shared)


def assert_parity(outcomes: list, batches: list, **model_options) -> None:
    reference = gpt(**model_options)
    losses = train_alone(reference, batches)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for rank, (got, weights, *_) in enumerate(outcomes):
        assert got == pytest.approx(losses, abs=TOLERANCE), rank
        for name, weight in weights.items():
            worst = (weight - expected[name].detach()).abs().max()
            assert worst <= TOLERANCE, (rank, name, float(worst))
        seen |= weights.keys()
    assert seen >= {name for name, _ in reference.named_parameters()}


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", FLUSHING)
def test_training_by_schedule_is_that_of_one_process(name, p):
    batches = [batch(6, length=4, seed=s) for s in range(2)]
    v = stages_of(name)[-1]
    depth = 2 * p if v == 2 else p + 1
    cases = [(v, m) for m in (1, 3, 6)]

    def rank(comm):
        return [train(comm, name, batches, v=v, m=m, depth=depth) for v, m in cases]

    outcomes = ranks(rank, p)
    row = pipeline.generator(name)
    for i, (v, m) in enumerate(cases):
        assert_parity([of[i] for of in outcomes], batches, depth=depth)
        stated = [row.live(p, m, v, rank) for rank in range(p)]
        assert [of[i][2].peak_live for of in outcomes] == stated


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", FLUSHING)
def test_training_of_many_shapes_for_twenty_steps_is_that_of_one_process(name, p):
    batches = [batch(6, length=4, seed=s) for s in range(20)]
    v = stages_of(name)[-1]
    cases = [(m, tied) for m in (1, 4, 6) for tied in (False, True)]

    def rank(comm):
        return [train(comm, name, batches, v=v, m=m, depth=v * p, tied=tied) for m, tied in cases]

    outcomes = ranks(rank, p)
    for i, (_, tied) in enumerate(cases):
        assert_parity([of[i] for of in outcomes], batches, depth=v * p, tied=tied)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zbv"])
def test_tied_weights_stay_tied_and_equal(name):
    batches = [batch(8, seed=s) for s in range(3)]
    v = pipeline.generator(name).default_stages
    outcomes = ranks(train, 2, name, batches, v=v, m=4, depth=4, tied=True)
    assert_parity(outcomes, batches, depth=4, tied=True)
    assert outcomes[0][3] == {"embed.weight": (0, 2 * v - 1)}
    if name != "zbv":  # where one rank has both
        assert torch.equal(outcomes[0][1]["embed.weight"], outcomes[1][1]["head.weight"])


def test_uneven_batches_few_samples_and_changing_lengths_are_those_of_one_process():
    shapes = [(7, 6), (7, 6), (2, 6), (5, 9), (7, 6), (1, 3), (8, 6)]
    batches = [batch(n, length, seed=i) for i, (n, length) in enumerate(shapes)]

    def rank(comm):
        return [train(comm, name, batches, m=3, depth=4) for name in ("1f1b", "zb1p")]

    outcomes = ranks(rank, 3)
    for i in range(2):
        assert_parity([of[i] for of in outcomes], batches, depth=4)


class Scaled(GPT):
    """A weight of the model itself, which every stage uses."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.scale = nn.Parameter(torch.full((16,), 0.7))

    def forward(self, tokens):
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x) * self.scale)


def test_weight_of_the_model_itself_has_the_same_bits_on_all_stages():
    x, y = batch(6)

    def model() -> Scaled:
        torch.manual_seed(0)
        return Scaled().double()

    def rank(comm):
        mine = model()
        cut = pipeline.cut(mine, "blocks", 3, [comm.rank])
        runtime = pipeline.PipelineRuntime(cut, "1f1b", comm, loss_fn=loss_sum)
        runtime.step(x, y, microbatches=3)
        return mine.scale.grad

    reference = model()
    loss_sum(reference(x), y)[0].backward()
    found = ranks(rank, 3)
    assert torch.allclose(found[0], reference.scale.grad, atol=1e-10, rtol=0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_shared_sums_are_made_in_the_order_of_ranks():
    """Three addends, of which the order matters to the last bit."""
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
        sum_shared_gradients(holder, (0, 1, 2), comm, {})
        return float(holder.weight.grad)

    assert ranks(rank, 3) == [0.0] * 3


def test_stages_may_take_microbatches_in_another_order():
    """Tags say what a message is: stage 1 begins with the microbatch that is sent last."""
    batches = [batch(5, seed=s) for s in range(3)]
    text = "0F0 0F1 0F2 0B1 0B0 0B2\n1F2 1F0 1F1 1B0 1B2 1B1"

    def rank(comm):
        model = gpt(depth=2)
        cut = pipeline.cut(model, "blocks", 2, [comm.rank])
        schedule = pipeline.Schedule.from_text(text)
        runtime = pipeline.PipelineRuntime(cut, schedule, comm, loss_fn=loss_sum)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            losses.append(runtime.step(x, y, microbatches=3, scale=1 / y.numel()).loss)
            optimizer.step()
        return losses, {name: p.detach() for name, p in model.named_parameters()}

    assert_parity(ranks(rank, 2), batches, depth=2)


def test_custom_schedule_without_split_backward_is_that_of_one_process():
    batches = [batch(4, seed=s) for s in range(2)]
    text = "0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1B0 1F1 1I1 1W1"

    def rank(comm):
        model = gpt(depth=2)
        cut = pipeline.cut(model, "blocks", 2, [comm.rank])
        schedule = pipeline.Schedule.from_text(text)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        runtime = pipeline.PipelineRuntime(
            cut, schedule, comm, loss_fn=loss_sum, split_backward=comm.rank == 0
        )
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            losses.append(runtime.step(x, y, microbatches=2, scale=1 / y.numel()).loss)
            optimizer.step()
        return losses, {name: p.detach() for name, p in model.named_parameters()}

    assert_parity(ranks(rank, 2), batches, depth=2)


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
    batches = [batch(8, seed=s) for s in range(3)]

    def rank(comm):
        *_, result, _ = train(comm, "1f1b", batches, m=4, depth=4)
        record = comm.message_record()
        return result.sent_bytes, len([m for m in record if m["kind"] == "send"])

    one_way = 8 * 6 * 16 * 8  # samples, length, dim, bytes
    sent = ranks(rank, 4)
    assert [nbytes for nbytes, _ in sent] == [one_way, 2 * one_way, 2 * one_way, one_way]
    # Four microbatches in three steps, and an announcement of two messages in the first.
    assert [messages for _, messages in sent] == [12 + 8, 24 + 8, 24 + 8, 12]
