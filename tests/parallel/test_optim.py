"""Optimizers with norms of tensors: on pieces, they give the weights of one process."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from mesh_cases import assert_equal_one_process, differences, fit
from tiny_gpt import GPT, PLAN, batches
from torch import nn

import pycoll
from pycoll import UsageError
from pycoll import parallel as pc


def groups(model: nn.Module):
    """Biases and norms step without norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "adapt": False, "weight_decay": 0.0},
    ]


def of_muon(model: nn.Module):
    """Matrices of the blocks are made orthogonal; the rest gets AdamW's step."""
    inside = [p for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in inside)]
    return [{"params": inside}, {"params": rest, "orthogonal": False, "lr": 0.01}]


KINDS = {
    # The gradient of a bias of keys is 0 but for rounding: `eps` keeps that from being scaled up.
    "Adafactor": lambda model: pc.optim.Adafactor(
        model.parameters(), lr=0.05, weight_decay=0.1, eps=(1e-3, 1e-3)
    ),
    "Muon": lambda model: pc.optim.Muon(of_muon(model), lr=0.02),
    "LAMB": lambda model: pc.optim.LAMB(groups(model), lr=0.02, weight_decay=0.1),
    "LARS": lambda model: pc.optim.LARS(groups(model), lr=0.5, weight_decay=0.1, trust=0.02),
}


def train(comm, sizes, kind, depth=4, tp=PLAN, **options):
    make, data = partial(GPT, depth=depth), batches(4, 8)
    return fit(comm, sizes, make, data, tp=tp, pp="blocks", optimizer=KINDS[kind], **options)


def test_pieces_step_as_whole_tensors():
    cases = [({"dp": 2}, {"zero": 3}, {"kind": "LAMB"}), ({"tp": 2}, {}, {"kind": "LARS"})]
    for kind in ("Adafactor", "Muon"):
        cases += [
            ({"dp": 2}, {"zero": 3}, {"kind": kind}),
            ({"tp": 2}, {}, {"kind": kind}),
            ({"dp": 2, "tp": 2}, {"zero": 1}, {"kind": kind}),
        ]
    assert_equal_one_process(train, cases)


def test_stages_without_pieces_step_beside_stages_with_pieces():
    """The plan shares out layers of the second stage alone."""
    plan = {
        f"blocks.1.{name}": style
        for name, style in (
            ("qkv", "qkv"),
            ("up", "col"),
            ("out", "row"),
            ("down", "row"),
            ("attention_drop", "inside:1"),
        )
    }
    cases = [
        ({"pp": 2, "tp": 2}, {"tp": plan}, {"kind": kind, "depth": 2})
        for kind in ("LAMB", "Adafactor", "Muon")
    ]
    assert_equal_one_process(train, cases)


@pytest.mark.slow
def test_pieces_step_as_whole_tensors_on_every_mesh():
    meshes = [
        ({"dp": 2}, {"zero": 0}),
        ({"dp": 2}, {"zero": 1, "bucket_mb": 0.01}),
        ({"dp": 2}, {"zero": 3}),
        ({"tp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
        ({"dp": 2, "pp": 2}, {"zero": 1}),
    ]
    assert_equal_one_process(train, [(*mesh, {"kind": kind}) for mesh in meshes for kind in KINDS])


def some_steps(comm, sizes, options, folder, first, last):
    """Steps from a checkpoint, or from the start, to a checkpoint; returns the weights."""
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(depth=1)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    optimizer = pc.optimizer(KINDS["Adafactor"](model))
    if first:
        pc.load(folder, model, optimizer)
    for x, y in itertools.islice(pc.shard(batches(last, 8), mesh), first, last):
        model.step(x, y, loss=pc.cross_entropy)
        optimizer.step()
    pc.save(folder, model, optimizer)
    return pc.whole_weights(model)


def test_factored_state_goes_through_a_checkpoint_to_another_mesh(tmp_path):
    expected = pycoll.run_ranks(some_steps, 1, {}, {}, tmp_path / "one", 0, 4)[0]
    pycoll.run_ranks(some_steps, 2, {"dp": 2}, {"zero": 3}, tmp_path / "two", 0, 2)
    found = pycoll.run_ranks(some_steps, 2, {"tp": 2}, {}, tmp_path / "two", 2, 4)[0]
    assert not list(differences(expected, found))


def steps(optimizer_of, count=3):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = optimizer_of([weight])
    seen = [weight.detach().clone()]
    for _ in range(count):
        weight.grad = weight.detach().cos()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


def test_steps_have_the_length_of_the_papers():
    seen = steps(lambda params: pc.optim.LAMB(params, lr=0.1))
    for before, after in zip(seen, seen[1:], strict=False):
        assert torch.isclose((after - before).norm(), 0.1 * before.norm())
    first, second = steps(lambda params: pc.optim.LARS(params, lr=0.1, trust=0.5), count=1)
    assert torch.isclose((second - first).norm(), 0.1 * 0.5 * first.norm())
    assert torch.allclose(
        (second - first) / (second - first).norm(), -first.cos() / first.cos().norm()
    )


def test_steps_without_norms_are_those_of_torch():
    pairs = [
        (
            lambda p: pc.optim.LARS(p, lr=0.1, weight_decay=0.2, adapt=False),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
        ),
        (
            lambda p: pc.optim.LAMB(p, lr=0.1, weight_decay=0.2, eps=1e-8, adapt=False),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
        ),
    ]
    pairs.append(
        (
            lambda p: pc.optim.Muon(p, lr=0.1, orthogonal=False, eps=1e-8, weight_decay=0.2),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
        )
    )
    for ours, theirs in pairs:
        assert torch.allclose(steps(ours)[-1], steps(theirs)[-1], rtol=1e-12)


def test_steps_of_whole_tensors_are_those_of_torch():
    def both(name, settings, tolerance):
        kinds = (getattr(pc.optim, name), getattr(torch.optim, name))
        ours, theirs = (steps(lambda p, kind=kind: kind(p, **settings))[-1] for kind in kinds)
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=0.1 * tolerance), settings

    for settings in ({"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.2, "d": 2.0, "eps": (1e-3, 0.1)}):
        both("Adafactor", settings, 1e-12)
    for settings in ({}, {"nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}):
        both("Muon", {"lr": 0.1, **settings}, 0.05)  # torch multiplies in bfloat16


def test_fused_steps_are_taken_unless_the_caller_has_decided():
    def flags(comm, **settings):
        model = pc.parallelize(nn.Linear(2, 2), pc.mesh(comm=comm))
        wrapped = pc.optimizer(torch.optim.AdamW(model.parameters(), **settings))
        return [group["fused"] for group in wrapped.param_groups]

    def work(comm):
        return [flags(comm), flags(comm, fused=False), flags(comm, foreach=False)]

    assert pycoll.run_ranks(work, 1)[0] == [[True], [False], [None]]


def test_bad_settings_are_refused():
    weight = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UsageError, match="lr is -1, expected 0 or more"):
        pc.optim.LAMB(weight, lr=-1)
    with pytest.raises(UsageError, match=r"shape \(2,\), expected matrices"):
        pc.optim.Muon(weight)
    with pytest.raises(UsageError, match="adjust_lr_fn is 'x', expected None"):
        pc.optim.Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="x")
    with pytest.raises(UsageError, match="beta2_decay is 1 and d is 1.0, expected 0 or less"):
        pc.optim.Adafactor(weight, beta2_decay=1)
    with pytest.raises(UsageError, match="momentum is 1, expected 0 or more and less than 1"):
        pc.optim.LARS(weight, lr=1, momentum=1)


def clipped_and_averaged(comm, sizes, **options):
    """Groups with and without a `clip`; the result holds the averages, and that they came back."""
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT()
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    parameters = list(model.parameters())
    split = [
        {"params": [p for p in parameters if p.dim() > 1], "clip": 0.3},
        {"params": [p for p in parameters if p.dim() == 1][::2], "clip": 0.01},
        {"params": [p for p in parameters if p.dim() == 1][1::2]},
    ]
    optimizer = pc.optimizer(torch.optim.SGD(split, lr=0.1), clip=0.02)
    ema = pc.EMA(model, decay=0.5)
    moved = []
    for x, y in pc.shard(batches(3, 8), mesh):
        model.step(x, y, loss=pc.cross_entropy, microbatches=2)
        optimizer.step()
        ema.update()
    weights = pc.whole_weights(model)
    model.eval()
    with ema.weights():
        averages = pc.whole_weights(model)
        moved.append(model.evaluate(x, y, loss=pc.cross_entropy))
    again = pc.whole_weights(model)
    mesh.close()
    for name, weight in weights.items():
        assert torch.equal(again[name], weight), name
        assert not torch.equal(averages[name], weight), name
    return weights, averages, moved


def test_groups_are_clipped_and_weights_averaged_as_on_one_process():
    cases = [({"dp": 2}, {"zero": 1}), ({"tp": 2}, {})]
    assert_equal_one_process(clipped_and_averaged, cases)


@pytest.mark.slow
def test_groups_are_clipped_and_weights_averaged_on_every_mesh():
    cases = [
        ({"dp": 2}, {}), ({"dp": 3}, {"zero": 3}), ({"dp": 2, "pp": 2}, {"zero": 2}),
    ]  # fmt: skip
    assert_equal_one_process(clipped_and_averaged, cases)


def of_torch_alone():
    torch.set_default_dtype(torch.float64)
    with pc.keyed_init(seed=3):
        model = GPT(drop=0.0)
    return model


def test_clip_of_groups_and_averages_are_those_of_torch():
    """One process: torch clips each group by itself, and averages by its own function."""

    def work(comm):
        plain, model = of_torch_alone(), of_torch_alone()
        pc.parallelize(model, pc.mesh(dp=1, comm=comm))
        ours, theirs = (
            [list(one.blocks.parameters()), [p for p in one.parameters() if p not in blocks]]
            for one in (model, plain)
            for blocks in [set(one.blocks.parameters())]
        )
        ours = [{"params": ours[0], "clip": 0.1}, {"params": ours[1]}]
        optimizer = pc.optimizer(torch.optim.SGD(ours, lr=0.5), clip=0.05)
        of_torch = torch.optim.SGD([{"params": group} for group in theirs], lr=0.5)
        ema = pc.EMA(model, decay=0.75)
        average = torch.optim.swa_utils.AveragedModel(
            plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
        )
        average.update_parameters(plain)
        for x, y in batches(3, 8):
            for one in (plain, model):
                out = one(x).flatten(0, 1)
                nn.functional.cross_entropy(out, y.flatten()).backward()
            for group, clip in zip(theirs, (0.1, 0.05), strict=True):
                nn.utils.clip_grad_norm_(group, clip)
            of_torch.step()
            of_torch.zero_grad()
            plain.zero_grad()
            optimizer.step()
            ema.update()
            average.update_parameters(plain)
        found = [(model.get_parameter(n), p) for n, p in plain.named_parameters()]
        found += [(ema.averages[n], average.module.get_parameter(n)) for n in ema.averages]
        return max(float((a - b).detach().abs().max()) for a, b in found)

    assert pycoll.run_ranks(work, 1)[0] < 1e-12


def test_step_without_clip_does_not_wait_for_other_stages():
    """The last stage waits until the first one has stepped, before it calls the optimizer."""

    def work(comm):
        mesh = pc.mesh(pp=2, comm=comm)
        model = pc.parallelize(GPT(depth=2), mesh, pp="blocks")
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer, has_stepped = pc.optimizer(inner), torch.zeros(1)
        x, y = next(batches(1, 4))
        model.step(x, y, loss=pc.cross_entropy)
        optimizer.grad_norm()  # the first one makes the communicator
        if comm.rank == 0:
            inner.register_step_post_hook(lambda *_: comm.send(has_stepped, 1))
        else:
            comm.recv(has_stepped, 0)
        return optimizer.step()

    first, second = pycoll.run_ranks(work, 2, timeout_s=10)
    assert first == second > 0


def test_bad_decay_is_refused():
    with pytest.raises(UsageError, match="decay is 1, expected 0 or more and less than 1"):
        pc.EMA(nn.Linear(1, 1), decay=1)
