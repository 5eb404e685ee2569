"""Schedules without a flush in the trainer: one process with gradients as old as stated."""

from __future__ import annotations

import functools

import pytest
import torch
from mesh_cases import assert_equal_one_process, assert_refused
from tiny_gpt import GPT, PLAN, batches, train

from pycoll import parallel as pc
from pycoll.parallel import pipeline
from pycoll.parallel.core.placement import share

DEPTH, STEPS, BATCH, MICROBATCHES = 4, 2, 12, 6
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def made() -> GPT:
    with pc.keyed_init(seed=3):
        return GPT(depth=DEPTH, drop=0.0)


def parts(x, dp: int, microbatches: int) -> list:
    """Joins the i-th microbatches of all replicas."""
    found: list[list] = [[] for _ in range(microbatches)]
    for replica in range(dp):
        start, stop = share(len(x), dp, replica)
        mine = x[start:stop]
        for i in range(min(microbatches, len(mine))):
            first, end = share(len(mine), min(microbatches, len(mine)), i)
            found[i].append(mine[first:end])
    return [torch.cat(part) for part in found if part]


def definition(schedule: str, dp: int, pp: int, optimizer: str, batch: int, microbatches: int):
    """One process, no pipeline: a stage learns from weights of the stated age."""
    staleness = pipeline.generator(schedule).staleness
    per_update = pipeline.build(schedule, pp, microbatches).per_update
    model = made()
    cut = pipeline.cut(made(), "blocks", pp, range(pp))
    stage_of = {name: stage for stage in range(pp) for name in cut.own(stage)}
    steps = OPTIMIZERS[optimizer](model.parameters())
    weights, losses, norms = dict(model.named_parameters()), [], []
    for x, y in batches(STEPS, batch):
        versions, total, tokens = [], 0.0, 0
        of_x, of_y = parts(x, dp, microbatches), parts(y, dp, microbatches)
        for i, (x_part, y_part) in enumerate(zip(of_x, of_y, strict=True)):
            update, place = divmod(i, per_update)
            if place == 0:
                versions.append({name: w.detach().clone() for name, w in weights.items()})
                steps.zero_grad()
            used = {
                name: versions[update - staleness(pp, stage, i)][name].clone().requires_grad_()
                for name, stage in stage_of.items()
            }
            out = torch.func.functional_call(model, used, (x_part,))
            count = int((y_part != -100).sum())
            loss = torch.nn.functional.cross_entropy(
                out.flatten(0, 1), y_part.flatten(), reduction="sum"
            )
            (loss / count / min(per_update, len(of_x) - i + place)).backward()
            for name, weight in weights.items():
                before = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = before + used[name].grad
            total, tokens = total + float(loss.detach()), tokens + count
            if place + 1 < per_update and i + 1 < len(of_x):
                continue
            norm = torch.cat([w.grad.flatten() for w in weights.values()]).norm()
            steps.step()
        losses.append(total / tokens)
        norms.append(float(norm))
    return losses, norms, {name: w.detach() for name, w in weights.items()}


def stale(
    comm,
    sizes,
    dp,
    pp,
    optimizer="adamw",
    batch=BATCH,
    microbatches=MICROBATCHES,
    schedule="pipedream",
    **options,
):
    """Losses, norms and weights: by definition without sizes, else by the trainer."""
    torch.set_default_dtype(torch.float64)
    if not sizes:
        return definition(schedule, dp, pp, optimizer, batch, microbatches)
    mesh = pc.mesh(**sizes, comm=comm)
    model = pc.parallelize(made(), mesh, tp=PLAN, pp="blocks", schedule=schedule, **options)
    steps = pc.optimizer(OPTIMIZERS[optimizer](model.parameters()))
    losses, norms = [], []
    for x, y in pc.shard(batches(STEPS, batch), mesh):
        out = model.step(x, y, loss=pc.cross_entropy, microbatches=microbatches)
        norms.append(steps.step())
        losses.append(out.loss)
    most = len(parts(torch.zeros(batch), dp, microbatches))
    ages = [pipeline.generator(schedule).staleness(pp, mesh.rank("pp"), i) for i in range(most)]
    assert out.staleness == max(ages)
    assert out.updates == -(-most // pipeline.build(schedule, pp, most).per_update)
    weights = pc.whole_weights(model)
    mesh.close()
    return losses, norms, weights


def assert_as_stated(cases: list[tuple]) -> None:
    """Checks cases: sizes of a mesh, options of the trainer, and other arguments of `stale`."""
    assert_equal_one_process(
        stale,
        [
            (sizes, options, {"dp": sizes.get("dp", 1), "pp": sizes.get("pp", 1), **more})
            for sizes, options, more in cases
        ],
    )


SHARES = {"zero": 2, "bucket_mb": 0.005}
SGD = {"optimizer": "sgd"}


TWO_VERSIONS, SYNC = {"schedule": "pipedream_2bw"}, {"schedule": "pipedream_vertical_sync"}


def test_pipedream_trains_as_one_process_with_gradients_as_old_as_stated():
    """Two seconds: five meshes."""
    assert_as_stated(
        [
            ({"pp": 4}, {}, {**SGD, "microbatches": 5}),
            ({"pp": 2, "dp": 2}, SHARES, {}),
            ({"pp": 4}, {}, {**SGD, **SYNC}),
            ({"pp": 2, "dp": 2}, SHARES, {**TWO_VERSIONS, "microbatches": 5}),
            ({"pp": 4}, {}, {**SGD, **TWO_VERSIONS, "microbatches": 11}),
        ]
    )


@pytest.mark.slow
def test_pipedream_on_every_mesh():
    """Replicas with different numbers of microbatches take the same updates."""
    assert_as_stated(
        [
            ({"pp": 1}, {}, {}),
            ({"dp": 2}, {}, SGD),
            ({"pp": 4}, {}, {}),
            ({"pp": 2, "dp": 2}, {}, SGD),
            ({"pp": 2, "tp": 2}, {}, {}),
            ({"pp": 2, "dp": 2, "tp": 2}, {}, SGD),
            ({"pp": 4, "dp": 2}, {}, {}),
            ({"dp": 4}, {**SHARES, "zero": 1}, {}),
            ({"dp": 4}, SHARES, SGD),
            ({"pp": 2, "dp": 2}, {**SHARES, "zero": 1}, {}),
            ({"pp": 2, "tp": 2}, {"sequence_parallel": True}, {}),
            ({"pp": 2, "dp": 2}, {}, {"batch": 7}),
            ({"dp": 3}, {}, {"batch": 5}),
            ({"pp": 2, "dp": 3}, {}, {"batch": 5}),
            ({"pp": 2, "dp": 3}, {}, {"batch": 7}),
            ({"dp": 2}, {}, TWO_VERSIONS),
            ({"pp": 2, "tp": 2}, {}, {**SGD, **TWO_VERSIONS}),
            ({"pp": 2, "dp": 2, "tp": 2}, {}, SYNC),
            ({"pp": 2, "dp": 3}, {}, {**TWO_VERSIONS, "batch": 7}),
        ]
    )


@pytest.mark.slow
def test_one_microbatch_is_never_stale_and_equals_one_process():
    """Dropout is on; its masks depend on the place alone."""
    pipedream = [({"pp": 2, "tp": 2}, {"schedule": "pipedream"})]
    assert_equal_one_process(train_unclipped, pipedream, schedule="1f1b")


def train_unclipped(comm, sizes: dict, schedule: str):
    losses, _, weights, _ = train(comm, sizes, microbatches=1, schedule=schedule, clip=None)
    return losses, weights


def without_optimizer(mesh):
    model = pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream")
    model.step(*next(batches(1, 2)), loss=pc.cross_entropy)


def clipped(mesh, clip=1.0):
    model = pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream")
    pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip=clip)
    return model


def added_up(mesh):
    model = clipped(mesh, None)
    with model.no_sync():
        model.step(*next(batches(1, 2)), loss=pc.cross_entropy)


def parallelize(tie=False, **options):
    def call(mesh):
        pc.parallelize(GPT(tie=tie), mesh, pp="blocks", schedule="pipedream", **options)

    return call


def test_what_an_update_within_a_step_does_not_go_with_is_one_sentence():
    assert_refused(
        {
            "recompute would use weights that schedule 'pipedream' has updated since": (
                parallelize(recompute=True)
            ),
            "which zero=3 would share out: take zero=2 or less": parallelize(zero=3),
            "they share token.weight: untie them or take a schedule with a flush": (
                parallelize(tie=True)
            ),
            "clip needs sums over all stages at once": clipped,
            "steps the optimizer within model.step: make it before, by pc.optimizer": (
                without_optimizer
            ),
            "no_sync adds gradients up over steps, and schedule 'pipedream' steps": added_up,
        },
        pp=2,
    )
