"""The first wrong output of a layer: found on any mesh, and none where nothing is wrong."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, PLAN, batches  # noqa: E402
from torch import nn  # noqa: E402
from worlds import in_one_world  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402
from pycoll.parallel.activations import Activations, first_difference  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


class Wrong(nn.Linear):
    """Off by a little."""

    def forward(self, x):
        return super().forward(x) + 1e-6


def record(comm, sizes: dict, path, wrong: bool, microbatches=2, **options):
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh):
        model = GPT(depth=2, tie=True).double()
        if wrong:
            model.blocks[1].up.__class__ = Wrong
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    activations = Activations(pc.trainer_of(model))
    model.step(
        *next(pc.shard(batches(1, 6), mesh)), loss=pc.cross_entropy, microbatches=microbatches
    )
    path = path.with_suffix(f".{comm.rank}")
    activations.write(path)
    return path


def test_first_wrong_output_is_found_on_a_mesh_and_none_where_all_are_right(tmp_path):
    layouts = [
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"pp": 2}, {"recompute": True}),
        ({"pp": 2, "tp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
    ]

    def work(comm, i: int, wrong: bool):
        sizes, options = layouts[i]
        return record(comm, sizes, tmp_path / f"{i}-{wrong}", wrong, **options)

    (one,) = run_ranks(record, 1, {}, tmp_path / "one", False, 1)
    cases = [
        (math.prod(layouts[i][0].values()), i, wrong)
        for i in range(len(layouts))
        for wrong in (False, True)
    ]
    for (_, i, wrong), paths in zip(cases, in_one_world(work, cases), strict=True):
        if wrong:
            layer, rank, difference = first_difference(one, paths, 1e-10)
            assert layer == "blocks.1.up" and rank.startswith("rank "), layouts[i]
            assert difference == pytest.approx(1e-6, rel=1e-3), layouts[i]
            continue
        assert first_difference(one, paths, 1e-10) is None, layouts[i]
        names = {call[0] for path in paths for call, _ in torch.load(path)["found"]}
        expected = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "drop", "qkv")}
        assert expected <= names, layouts[i]
