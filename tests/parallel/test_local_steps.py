"""Local steps: equal to averaging by hand, and to training in step where they should be."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pycoll
from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.replicas.compression import ErrorFeedback, Int8, TopK

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

COUNT = 700


def trained(comm, rounds, **options):
    """Weights after steps along gradients that differ by rank, and what was exchanged."""
    weight = nn.Parameter(torch.linspace(-1, 1, COUNT, dtype=torch.float64))
    group = AxisGroup.over(comm, "replicas")
    optimizer = pc.diloco(torch.optim.SGD([weight], lr=0.1), group=group, **options)
    for step in range(rounds):
        weight.grad = gradient(weight.detach(), comm.rank, step)
        optimizer.step()
    return weight.detach(), group.ledger


def gradient(weight, rank, step):
    return (weight - rank).sin() + 0.01 * step


def by_hand(num_ranks, rounds, steps, outer_lr, outer_momentum, overlap=0):
    """Weights of all ranks, one after the other: the algorithm of the paper."""
    common = torch.linspace(-1, 1, COUNT, dtype=torch.float64)
    ranks = [common.clone() for _ in range(num_ranks)]
    speed = torch.zeros_like(common)
    at_start = ranks
    for step in range(rounds):
        ranks = [w - 0.1 * gradient(w, rank, step) for rank, w in enumerate(ranks)]
        if (step + 1) % steps == 0:
            at_start = ranks
        if step + 1 >= steps and (step + 1) % steps == overlap:
            change = common - torch.stack(at_start).mean(0)
            speed = outer_momentum * speed + change
            common = common - outer_lr * (change + outer_momentum * speed)
            ranks = [w + common - before for w, before in zip(ranks, at_start, strict=True)]
    return ranks


def run_cases(comm):
    n = comm.size
    for options in (
        {"steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
        {"steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        {"steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "overlap": 2},
    ):
        found, ledger = trained(comm, 12, **options)
        expected = by_hand(n, 12, **options)
        assert torch.allclose(found, expected[comm.rank], atol=1e-12), options
        sent = ledger.of("replicas", "all_reduce")
        assert (sent.calls, sent.nbytes) == (12 // options["steps"], 12 // options["steps"] * 5600)
    whole, _ = trained(comm, 12, steps=4)
    fragments, ledger = trained(comm, 12, steps=4, fragments=2)
    assert ledger.of("replicas", "all_reduce").calls == 5  # at steps 4, 6, 8, 10, 12
    half = COUNT // 2
    assert torch.equal(fragments[:half], whole[:half])
    rounded, ledger = trained(comm, 12, steps=4, compress="int8")
    assert (rounded - whole).abs().max() < 0.02
    assert ledger.of("replicas", "all_gather").nbytes == 3 * n * 3 * 260


def test_local_steps_are_those_of_the_paper():
    pycoll.run_ranks(run_cases, 3, timeout_s=30)


@pytest.mark.pure
@pytest.mark.parametrize("compressor", [Int8(), TopK(0.1)])
def test_what_compression_loses_arrives_in_the_end(compressor):
    x = torch.linspace(-1, 1, COUNT, dtype=torch.float64) ** 3
    feedback = ErrorFeedback(compressor)
    messages = [feedback.encode(x) for _ in range(100)]
    assert {message.numel() for message in messages} == {compressor.nbytes(COUNT)}
    mean = sum(compressor.decode(message, x) for message in messages) / len(messages)
    once = compressor.decode(compressor.encode(x), x)
    assert (mean - x).abs().max() < 0.5 * (once - x).abs().max()


@pytest.mark.pure
@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": 2, "fragments": 3}, {"steps": 2, "overlap": 2}]
)
def test_numbers_that_do_not_fit_are_refused(options):
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match="local steps: steps="):
        pc.diloco(torch.optim.SGD([weight], lr=0.1), **options)
    with pytest.raises(UsageError, match="compress='int4'"):
        pc.diloco(torch.optim.SGD([weight], lr=0.1), compress="int4")


def of_switch(comm, replicas, sizes):
    """Weights and losses of a small model after 6 steps in float64."""
    mesh = pc.mesh(dp=-1, comm=comm, **sizes)
    with pc.keyed_init(mesh, seed=0):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plan = {"0": "col", "2": "row"} if sizes else None
    model = pc.parallelize(model, mesh, tp=plan, replicas=replicas)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(12) % 3
    for _ in range(6):
        for batch_x, batch_y in pc.shard([(x, y)], mesh):
            model.step(batch_x, batch_y, loss=nn.functional.cross_entropy)
            optimizer.step()
    with optimizer.mean_weights():
        mean = pc.whole_weights(model)
    optimizer.close()
    mesh.close()
    return mean


def switch_cases(comm):
    for sizes in ({}, {"tp": 2}):
        together = of_switch(comm, "allreduce", sizes)
        averaged = of_switch(comm, "local:steps=1,outer_lr=1,outer_momentum=0", sizes)
        for name, value in together.items():
            assert (averaged[name] - value).abs().max() < 1e-12, (sizes, name)
        for replicas in ("gossip:graph=ring", "gossip:mode=sgp", "local:steps=3,compress=int8"):
            apart = of_switch(comm, replicas, sizes)
            differences = [(apart[name] - value).abs().max() for name, value in together.items()]
            assert 0 < max(differences) < 0.1, (replicas, sizes, differences)


def test_the_switch_averages_replicas_of_every_mesh():
    """A second: eight trainings in one world."""
    pycoll.run_ranks(switch_cases, 4, timeout_s=60)


@pytest.mark.parametrize(
    "replicas, text",
    [
        ("gosip", "expected 'allreduce', 'gossip', 'local'"),
        ("gossip:grph=ring", "'grph=ring' is no option; options: graph=exponential"),
        ("gossip:graph=torus", "graph='torus', expected one of complete"),
        ("local:steps=many", "'steps=many' is no option"),
        ("allreduce:steps=3", "expected 'allreduce'"),
    ],
)
def test_wrong_switches_are_refused_by_name(replicas, text):
    def attempt(comm):
        model = pc.parallelize(nn.Linear(2, 2), pc.mesh(comm=comm), replicas=replicas)
        pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(UsageError, match=text):
        pycoll.run_ranks(attempt, 2, threads=True, timeout_s=20)


def trained_apart(comm, replicas: str, folder, first: int, last: int) -> list[torch.Tensor]:
    """Weights after steps `first` to `last` of identical batches; loads and saves in `folder`."""
    torch.manual_seed(0)
    mesh = pc.mesh(comm=comm)
    model = pc.parallelize(nn.Linear(5, 400).double(), mesh, replicas=replicas)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    if first:
        pc.load(folder, model, optimizer)
    for step in range(first, last):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
        model.step(x, torch.arange(4), loss=nn.functional.cross_entropy)
        optimizer.step()
    with optimizer.mean_weights():
        pc.save(folder, model, optimizer)
        pc.save_pretrained(model, folder / "weights")
        found = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    mesh.close()
    return found


@pytest.mark.parametrize("replicas", ["ps:servers=2", "local:steps=3"])
def test_two_replicas_are_saved_and_three_continue_with_outer_steps_and_servers(replicas, tmp_path):
    """What outer optimizers and servers keep is saved, too; each replica wrote before."""
    expected = pycoll.run_ranks(trained_apart, 2, replicas, tmp_path / "whole", 0, 8)[0]
    pycoll.run_ranks(trained_apart, 2, replicas, tmp_path / "parts", 0, 5)
    found = pycoll.run_ranks(trained_apart, 3, replicas, tmp_path / "parts", 5, 8)[2]
    written = load_file(tmp_path / "parts" / "weights" / "model.safetensors")
    for wanted, weights, name in zip(expected, found, ("weight", "bias"), strict=True):
        assert torch.allclose(wanted, weights, rtol=0, atol=1e-12)
        assert torch.equal(weights, written[name])
