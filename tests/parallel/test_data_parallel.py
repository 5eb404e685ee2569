"""Data parallelism: uneven batches, unused parameters, added gradients, short floats, norms."""

from __future__ import annotations

import io

import pytest
import torch
from mesh_cases import assert_equal_one_process, fit, one_process
from tiny_gpt import GPT, PLAN, batches
from torch import nn
from torch.nn import functional

from pycoll import CollectiveMismatchError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.core.logits import mark

SIZES = [9, 8, 11, 9, 5, 8, 1]  # batch sizes; some do not divide, or are smaller than the ranks


class Mlp(nn.Module):
    uses_sometimes = True  # if the first sample says so

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 3)
        self.drop = nn.Dropout(0.2)
        self.never, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.second(self.drop(torch.tanh(self.first(x))))
        return self.sometimes(y) if self.uses_sometimes and x[0, 0] > 0 else y


def data(dtype=torch.float64):
    random = torch.Generator().manual_seed(5)
    for size in SIZES:
        x = torch.randn(size, 6, generator=random, dtype=torch.float64)
        yield x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def train(comm, sizes, microbatches=1, no_sync=False, dtype=torch.float64, **options):
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=1):
        model = Mlp()
    model = pc.parallelize(model.to(dtype), mesh, bucket_mb=0.0003, **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), clip=1.0)
    losses = []
    for i, (x, y) in enumerate(pc.shard(data(dtype), mesh)):
        if no_sync and i % 3:
            with model.no_sync():
                model.step(x, y, loss=pc.cross_entropy, microbatches=microbatches)
            continue
        out = model.step(x, y, loss=pc.cross_entropy, microbatches=microbatches)
        optimizer.step()
        losses.append(out.loss)
    return losses, pc.whole_weights(model), sorted(out.unused)


def test_uneven_batches_and_unused_parameters_equal_one_process():
    """One process takes as many microbatches as there are ranks: one is the share of a rank."""
    sizes = (2, 3, 8)
    cases = [({"dp": n}, {"microbatches": 1}, {"microbatches": n}) for n in sizes]
    no_sync = {"microbatches": 2, "no_sync": True}
    cases += [({"dp": 2}, {"microbatches": 1, "zero": zero}, no_sync) for zero in (0, 2)]
    assert_equal_one_process(train, cases)
    with pc.keyed_init(seed=1):
        fresh = Mlp()
    untouched = fresh.never.weight.detach().double()
    for n in sizes:
        _, weights, unused = one_process(train, microbatches=n)
        assert set(unused) >= {"never.weight", "never.bias"}
        assert torch.equal(weights["never.weight"], untouched)  # it does not decay either


def test_short_floats_keep_gradients_and_weights_in_float32(monkeypatch):
    monkeypatch.setattr(Mlp, "uses_sometimes", False)
    setup = {"microbatches": 2, "dtype": torch.bfloat16}
    cases = [({"dp": 2}, {"microbatches": 1, "zero": zero}) for zero in range(4)]
    assert_equal_one_process(train, cases, tolerance=1e-6, **setup)
    weights = one_process(train, **setup)[1]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_log_says_the_same_on_all_ranks_and_names_unused_parameters():
    def work(comm):
        mesh = pc.mesh(comm=comm)
        with pc.keyed_init(mesh, seed=1):
            model = pc.parallelize(Mlp(), mesh)
        optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        text = io.StringIO()
        for x, y in pc.shard(list(data(torch.float32))[:2], mesh):
            out = model.step(x, y, loss=pc.cross_entropy)
            optimizer.step()
            numbers = pc.log(out, total=2, file=text)
        return numbers, text.getvalue()

    (first, text), (second, nothing) = run_ranks(work, 2)
    assert nothing == ""
    assert text.count("no replica used parameter never.weight") == 1
    assert "step       2/2, loss " in text
    for key in ("step", "loss", "grad_norm", "tokens"):
        assert first[key] == second[key]
    assert first["tokens_per_s"] > 0 and 0 <= first["exposed_communication"] <= 1


def test_forward_that_differs_between_ranks_is_named():
    """With ZeRO 3 a layer that only one rank uses is a collective that only one rank enters."""

    def work(comm):
        model = pc.parallelize(Mlp().double(), pc.mesh(comm=comm), zero=3)
        x = torch.full((4, 6), 1.0 - 2.0 * comm.rank)
        model.step(x, torch.zeros(4).long(), loss=pc.cross_entropy)

    for error in run_ranks(work, 2, return_errors=True):
        assert isinstance(error, CollectiveMismatchError)
        assert "rank 0 of 2" in str(error) or "rank 1 of 2" in str(error)


def test_parameters_that_zero_3_has_given_up_show_no_numbers():
    def work(comm):
        model = pc.parallelize(nn.Sequential(nn.Linear(2, 2)), pc.mesh(comm=comm), zero=3)
        assert model[0].weight.shape == (2, 2) and model[0].weight.isnan().all()
        with torch.no_grad():
            model[0].weight.fill_(1)  # has no effect
        out = model(torch.ones(1, 2))  # gathers the parameters while it needs them
        assert not out.isnan().any() and not out.equal(torch.full((1, 2), 2.0))

    run_ranks(work, 2)


OF_IMAGES = [9, 7, 3, 1]  # 3/3/3, 3/2/2, 1/1/1, 1/0/0


def net_with_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def train_with_norm(comm, sizes, **options):
    random = torch.Generator().manual_seed(4)
    data = [
        (
            torch.randn(n, 2, 5, 5, generator=random, dtype=torch.float64) * 3 + 5,
            torch.arange(n) % 3,
        )
        for n in OF_IMAGES
    ]
    statistics = lambda model: dict(model.named_buffers())  # noqa: E731
    loss = functional.cross_entropy
    return fit(
        comm, sizes, net_with_norm, data, loss=loss, microbatches=1, also=statistics, **options
    )


def test_batch_normalisation_of_uneven_and_empty_batches_equals_one_process():
    assert_equal_one_process(train_with_norm, [({"dp": 3}, {})])


def losses_of_short_floats(comm):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=random).bfloat16()
    target = torch.randint(1000, (64,), generator=random)
    mesh = pc.mesh(dp=1, tp=-1, comm=comm)
    start, stop = comm.rank * 500, (comm.rank + 1) * 500
    part = mark(logits[:, start:stop].contiguous(), (start, stop), 1000, mesh.line("tp"))
    sums = [pc.cross_entropy(one, target)[0] for one in (logits, part)]
    expected = functional.cross_entropy(logits.float(), target, reduction="sum")
    return [abs(float(one - expected)) / float(expected) for one in sums]


def test_cross_entropy_of_short_floats_is_summed_in_float32():
    for errors in run_ranks(losses_of_short_floats, 2):
        assert max(errors) < 1e-6, errors


def loss_under_autocast(comm, sizes):
    """The weights are the head's at the start, so the loss is close to the logarithm of 101."""
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(vocab=101, drop=0.0)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks")
    x, y = next(batches(1, 8, vocab=101))
    exact = model.evaluate(x, y, loss=pc.cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.step(x, y, loss=pc.cross_entropy).loss
    mesh.close()
    return found, exact


def test_losses_under_autocast_are_those_of_one_process():
    """bfloat16 has 8 bits: the sums of a tp row round otherwise, the loss itself does not."""
    one, exact = run_ranks(loss_under_autocast, 1, {})[0]
    for found, _ in run_ranks(loss_under_autocast, 2, {"tp": 2}):
        assert found == pytest.approx(one, abs=1e-3)
    assert one == pytest.approx(exact, abs=5e-3) and one != exact
