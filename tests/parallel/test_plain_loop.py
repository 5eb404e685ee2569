"""The loop that PyTorch users write trains a parallelized model as plain torch does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from mesh_cases import assert_equal_one_process, assert_refused, in_one_world
from tiny_gpt import GPT, PLAN
from torch import nn, optim
from torch.nn import functional

import pycoll
from pycoll import parallel as pc

VOCAB, LENGTH = 32, 16
TIED = {"fused": True, "context": LENGTH, "tie": True}
EXPERTS = {"fused": True, "context": LENGTH, "experts": 4}


def make(gpt) -> nn.Module:
    with pc.keyed_init(seed=4):
        model = GPT(drop=0.0, vocab=VOCAB, **gpt)
    model.blocks[0].norm_1.weight.requires_grad_(False)
    return model


def train(comm, sizes, gpt, steps, accumulate="no_sync", wrap=True, **options):
    """On one process, nothing of pycoll but the initial weights."""
    torch.set_default_dtype(torch.float64)
    model, clip = make(gpt), 0.5
    if sizes:
        mesh = pc.mesh(**sizes, comm=comm)
        model = pc.parallelize(model, mesh, bucket_mb=0.01, **options)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    if sizes and wrap:
        optimizer = pc.optimizer(optimizer, clip=clip)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for part in range(2):
            tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=random)
            if sizes:
                replicas = mesh.line_of_dp("ep")
                tokens = tokens.chunk(replicas.size)[replicas.rank]
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
            if sizes and part == 0 and accumulate == "no_sync":
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if not sizes or not wrap:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not sizes:
        return {name: p.detach() for name, p in model.named_parameters()}
    weights = pc.whole_weights(model)
    mesh.close()
    frozen = "blocks.0.norm_1.weight"
    return {**weights, frozen: model.get_parameter(frozen).detach()}


def test_plain_loop_trains_as_one_process():
    """With accumulation, clipping, a scheduler, frozen and tied weights."""
    few = [
        ({"dp": 2}, {"zero": 1}),
        ({"dp": 2, "tp": 2}, {"tp": PLAN, "accumulate": "each time"}),
        ({"cp": 2}, {"pp": "blocks", "zero": 3}),
    ]
    assert_equal_one_process(train, few, gpt=TIED, steps=4)


@pytest.mark.slow
def test_plain_loop_trains_as_one_process_on_every_mesh():
    assert_equal_one_process(
        train,
        [
            ({"dp": 2}, {}),
            ({"dp": 2}, {"accumulate": "each time"}),
            ({"dp": 2}, {"wrap": False}),
            *(({"dp": 2}, {"zero": zero}) for zero in (1, 2, 3)),
            ({"dp": 2}, {"zero": 3, "accumulate": "each time"}),
            ({"tp": 2}, {"tp": PLAN}),
            ({"dp": 2, "tp": 2}, {"tp": PLAN, "zero": 1, "accumulate": "each time"}),
            ({"cp": 2}, {"pp": "blocks"}),
            ({"ep": 2}, {}, {"gpt": EXPERTS}),
        ],
        gpt=TIED,
        steps=20,
    )


class Normed(optim.SGD):
    """Divides each gradient by its norm, as LARS does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm() + 1
        return super().step(closure)


class MyAdamW(optim.AdamW):
    pass


def linear(mesh, bias=True, **options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4, bias), nn.Linear(4, 2, bias))
    return pc.parallelize(layers, mesh, **options)


def step_of_torch(mesh, kind=optim.SGD, **options):
    model = linear(mesh, **options)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def step_of_a_scaler(mesh):
    model = linear(mesh)
    optimizer = pc.optimizer(optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)


def load_from_elsewhere(mesh):
    model = linear(mesh, zero=1)
    optimizer = pc.optimizer(optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, optim.Optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optim.SGD(linear(mesh).parameters(), lr=0.1).state_dict())


def load_of_another(mesh, rank=0, zero=1):
    """Loads the state of the first rank after `rank`, or of another ZeRO level."""
    first, second = (
        pc.optimizer(optim.SGD(linear(mesh, zero=level).parameters(), lr=0.1))
        for level in (zero, 1)
    )
    state = first.state_dict()
    if rank:
        state["pycoll"] = {**state["pycoll"], "rank": (mesh.world.rank + rank) % mesh.world.size}
    second.load_state_dict(state)


def test_what_would_train_otherwise_is_refused():
    column = {"0": "col", "1": "row"}
    assert_refused(
        {
            "SGD would not train '0.weight'": lambda mesh: step_of_torch(mesh, zero=1),
            "Normed does not step each element by itself": lambda mesh: pc.optimizer(
                Normed(linear(mesh, zero=1).parameters(), lr=0.1)
            ),
            "Adafactor does not step each element by itself": lambda mesh: pc.optimizer(
                optim.Adafactor(linear(mesh, zero=2).parameters())
            ),
            "Muon does not step each element by itself": lambda mesh: pc.optimizer(
                optim.Muon(linear(mesh, zero=1, bias=False).parameters())
            ),
            "GradScaler: each rank would decide": step_of_a_scaler,
            "the state is that of None": load_from_elsewhere,
            "pc.save and pc.load move state between meshes": lambda mesh: load_of_another(
                mesh, rank=1
            ),
            "'zero': 2, 'rank': ": lambda mesh: load_of_another(mesh, zero=2),
        },
        dp=2,
    )
    assert_refused(
        {
            "Normed does not step each element by itself": lambda mesh: pc.optimizer(
                Normed(linear(mesh, tp=column).parameters(), lr=0.1)
            ),
            "Muon does not step each element by itself": lambda mesh: pc.optimizer(
                optim.Muon(linear(mesh, bias=False, tp=column).parameters())
            ),
            "LAMB does not step each element by itself": lambda mesh: step_of_torch(
                mesh, pc.optim.LAMB, tp=column
            ),
            "add_param_group: this rank's pieces": lambda mesh: pc.optimizer(
                optim.SGD(linear(mesh).parameters(), lr=0.1)
            ).add_param_group({"params": []}),
        },
        tp=2,
    )
    assert_refused({"GradScaler: each rank would decide": step_of_a_scaler}, dp=1)
    assert_refused(
        {
            "call model.step(x, y, loss=...)": lambda mesh: linear(mesh, pp="")(torch.ones(2, 4)),
        },
        pp=2,
    )


def norms_and_others(comm):
    mesh = pc.mesh(dp=-1, comm=comm)
    whole = linear(mesh)
    pc.optimizer(Normed(whole.parameters(), lr=0.1))  # every rank has whole parameters
    pc.optimizer(MyAdamW(linear(mesh, zero=3).parameters(), lr=0.1))
    # A backward pass that fails leaves nothing for the next one.
    x = torch.full((2, 4), comm.rank + 1.0)
    entered = x.clone().requires_grad_()
    entered.register_hook(lambda gradient: 1 / 0)
    model = linear(mesh)
    with contextlib.suppress(ZeroDivisionError):
        model(entered).sum().backward()
    model(x).sum().backward()
    single = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    single.load_state_dict(model.state_dict())
    sum(single(torch.full((2, 4), r + 1.0)).sum() / comm.size for r in range(comm.size)).backward()
    found = [p.grad.clone() for p in model.parameters()]
    expected = [p.grad for p in single.parameters()]
    # Twice through the same graph, and gradients of other things between.
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
    loss.backward()
    thrice = [p.grad for p in model.parameters()]
    mesh.close()
    return [
        float((a - b).abs().max())
        for a, b in [*zip(found, expected), *zip(thrice, (3 * g for g in expected))]  # noqa: B905
    ]


def test_gradients_add_up_as_in_torch():
    for errors in in_one_world(norms_and_others, [(2,)])[0]:
        assert max(errors) < 1e-5, errors


def scaled_steps(comm):
    """The second loss is infinite by one bias alone, which is in one rank's share."""
    mesh = pc.mesh(dp=-1, comm=comm)
    model = linear(mesh, zero=1)
    optimizer = pc.optimizer(optim.SGD(model.parameters(), lr=0.1))
    scaler = pc.GradScaler("cpu", init_scale=4.0)
    seen = []
    for step in range(3):
        loss = model(torch.ones(2, 4)).sum()
        if step == 1 and comm.rank == 0:
            loss = loss + torch.inf * model[1].bias[1]
        scaler.scale(loss).backward()
        finite = all(
            p.value.grad.isfinite().all() for p in optimizer.trainer.reducer.pieces.values()
        )
        before = pc.whole_weights(model)
        scaler.step(optimizer)
        scaler.update()
        moved = any((before[name] != w).any() for name, w in pc.whole_weights(model).items())
        seen.append((finite, moved, scaler.get_scale()))
    return seen


def test_all_ranks_skip_a_step_or_none_does():
    before, infinite, after = zip(*pycoll.run_ranks(scaled_steps, 2), strict=True)
    assert before == ((True, True, 4.0),) * 2
    assert sorted(infinite) == [(False, False, 2.0), (True, False, 2.0)]  # one rank sees it
    assert after == ((True, True, 2.0),) * 2


def test_optimizer_of_other_models_is_left_alone():
    def work(comm):
        mesh = pc.mesh(dp=-1, comm=comm)
        linear(mesh, zero=3)
        other = nn.Linear(2, 2)
        before = other.weight.detach().clone()
        other(torch.ones(2, 2)).sum().backward()
        optim.SGD(other.parameters(), lr=0.1).step()
        return bool((other.weight != before).all())

    assert pycoll.run_ranks(work, 2) == [True, True]
