"""Layout invariance: losses, norms and weights of every mesh equal those of one process."""

from __future__ import annotations

import math

import pytest
import torch
from mesh_cases import assert_equal_one_process, covering, fit
from tiny_gpt import GPT, PLAN, batches, train
from torch.nn import functional

from pycoll import parallel as pc
from pycoll import run_ranks
from pycoll.parallel import pipeline

SCHEDULES = [name for name in pipeline.names() if pipeline.generator(name).staleness is None]
FUSED = {"fused": True, "context": 16}  # sequences can be cut where attention is torch's function
EXPERTS = {**FUSED, "experts": 5}


def test_meshes_of_two_to_eight_ranks_equal_one_process():
    tied, uneven = {"gpt": {"tie": True}}, {"gpt": {"tie": True, "hidden": 37, "vocab": 31}}
    on_one_stage = {"zero": 1, "sequence_parallel": True, "tp": plan_without_experts(2)}
    assert_equal_one_process(
        train,
        [
            *(({"dp": 2}, {"zero": z, "recompute": z == 3, "bucket_mb": 0.01}) for z in range(4)),
            ({"tp": 2}, {}),
            ({"tp": 2}, {"sequence_parallel": True}),
            ({"tp": 2}, {}, uneven),
            ({"dp": 2, "tp": 2}, {"zero": 2, "sequence_parallel": True, "recompute": "blocks.*"}),
            ({"dp": 4}, {"zero": 3, "zero_group": 2}),
            ({"pp": 2}, {"schedule": "zb1p", "zero": 3}),
            ({"pp": 2}, {"schedule": "zb1p", "zero": 3}, tied),
            ({"cp": 2, "tp": 2}, {"sequence_parallel": True}, {"gpt": FUSED}),
            ({"dp": 2}, {"zero": 3, "recompute": "selective"}, {"gpt": FUSED}),
            ({"dp": 2, "ep": 2}, {"zero": 1}, {"gpt": EXPERTS}),
            ({"dp": 2, "pp": 2, "tp": 2}, {"zero": 1, "sequence_parallel": True}),
            ({"ep": 2, "pp": 2, "tp": 2}, on_one_stage, {"gpt": {**EXPERTS, "depth": 2}}),
        ],
    )


def train_compiled(comm, sizes, compiled=False, **options):
    def make():
        model = GPT(drop=0.0, depth=2, fused=True)
        for block in model.blocks if compiled else ():
            block.compile(backend="eager")
        return model

    return fit(comm, sizes, make, batches(2, 4), tp=PLAN, pp="blocks", **options)


@pytest.mark.slow
def test_groups_of_replicas_that_shard_equal_one_process():
    assert_equal_one_process(
        train,
        [
            ({"dp": 4}, {"zero": 1, "zero_group": 2, "bucket_mb": 0.01}),
            ({"dp": 4}, {"zero": 2, "zero_group": 2}),
            ({"dp": 4}, {"zero": 3, "zero_group": 1}),
            ({"dp": 2, "cp": 2}, {"zero": 3, "zero_group": 2}, {"gpt": FUSED}),
            ({"dp": 2, "ep": 2}, {"zero": 3, "zero_group": 2}, {"gpt": EXPERTS}),
            ({"dp": 4, "pp": 2}, {"zero": 3, "zero_group": 2}),
        ],
    )


@pytest.mark.slow
def test_selective_recomputation_equals_one_process():
    options = {"recompute": "selective"}
    assert_equal_one_process(
        train,
        [
            ({"cp": 2}, {"zero": 2, **options}, {"gpt": FUSED}),
            ({"pp": 2}, {"schedule": "zb1p", **options}),
            ({"pp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True, **options}),
            ({"ep": 2, "pp": 2}, {"zero": 1, "schedule": "gpipe", **options}, {"gpt": EXPERTS}),
        ],
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns at each graph break
def test_compiled_blocks_equal_one_process():
    """Seconds: torch's compiler."""
    cases = [({"dp": 2}, {"zero": 1, "compiled": True}), ({"tp": 2}, {"compiled": True})]
    assert_equal_one_process(train_compiled, cases)


VALUES = {
    "dp": (1, 2, 4, 8),
    "ep": (1, 2, 5),
    "cp": (1, 2, 8),
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "recompute": (False, True),
    "sequence_parallel": (False, True),
    "schedule": SCHEDULES,
}
AXES = ("dp", "ep", "cp", "tp", "pp")


def num_ranks(row: dict) -> int:
    return math.prod(row[axis] for axis in AXES)


def allowed(row: dict) -> bool:
    return (
        1 < num_ranks(row) <= 8
        and (row["tp"] > 1 or not row["sequence_parallel"])
        and (row["pp"] > 1 or row["schedule"] == "1f1b")
        and (row["pp"] == 1 or max(row["dp"], row["tp"]) <= 2)
        and (row["pp"] < 8 or row["schedule"] in ("1f1b", "zbv"))
    )


def depth_for(row: dict) -> int:
    return max(4, row["pp"] * pipeline.generator(row["schedule"]).default_stages)


def plan_without_experts(depth: int) -> dict:
    """With sequence_parallel, tp leaves experts whole. Blocks with an even number have none."""
    up, down = (
        "|".join(f"blocks.{i}.{name}" for i in range(0, depth, 2)) for name in ("up", "down")
    )
    return {"*.qkv": "qkv", up: "col", f"*.out|{down}": "row", "token|head": "vocab"}


def case_of(row: dict) -> tuple:
    gpt = EXPERTS if row["ep"] > 1 else FUSED if row["cp"] > 1 else {}
    options = {name: value for name, value in row.items() if name not in AXES}
    if row["ep"] > 1 and row["sequence_parallel"]:
        options["tp"] = plan_without_experts(depth_for(row))
    return {axis: row[axis] for axis in AXES}, options, {"gpt": {**gpt, "depth": depth_for(row)}}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_of_sizes_and_options_equals_one_process():
    rows = covering(VALUES, allowed, lambda row: num_ranks(row) // row["pp"] * depth_for(row) + 8)
    print(f"{len(rows)} combinations")
    assert_equal_one_process(train, [case_of(row) for row in rows], batch=16, steps=3)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_steps_on_every_factorisation_of_8_ranks_equal_one_process():
    layouts = [
        {"dp": dp, "tp": tp, "pp": 8 // dp // tp}
        for dp, tp in (
            (1, 1),
            (1, 2),
            (1, 4),
            (1, 8),
            (2, 1),
            (2, 2),
            (2, 4),
            (4, 1),
            (4, 2),
            (8, 1),
        )
    ]
    assert_equal_one_process(
        train,
        [(sizes, {"zero": i % 4, "recompute": i % 3 == 0}) for i, sizes in enumerate(layouts)],
        batch=16,
        steps=20,
        gpt={"depth": 8},
    )


class InDict(GPT):
    def forward(self, tokens_BT):
        return {"logits": super().forward(tokens_BT), "more": 1}


def mean_of_torch(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_losses_of_whole_and_shared_logits_are_equal():
    x, y = next(batches(1, 4))

    def work(comm):
        torch.set_default_dtype(torch.float64)
        mesh = pc.mesh(tp=comm.size, comm=comm)
        found = []
        for make, loss in (
            (GPT, pc.cross_entropy),
            (GPT, mean_of_torch),
            (InDict, lambda out, y: mean_of_torch(out["logits"], y)),
        ):
            with pc.keyed_init(mesh):
                model = make(depth=1, drop=0.0)
            model = pc.parallelize(model, mesh, tp=PLAN)
            found.append(model.evaluate(x, y, loss=loss))
            out = model.step(x, y, loss=loss, microbatches=2)
            found += [out.loss, float(pc.whole_gradients(model)["head.weight"].norm())]
            assert out.tokens == int((y != -100).sum())
        return found

    expected = run_ranks(work, 1)[0]
    assert expected[::3] == pytest.approx(expected[1::3], abs=1e-12)
    for found in run_ranks(work, 2):
        assert found == pytest.approx(expected, abs=1e-12)
        assert found[0] == pytest.approx(found[3], abs=1e-12)
