"""The first wrong output of a layer: found on any mesh, and none where nothing is wrong."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, PLAN, batches  # noqa: E402
from torch import nn  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402
from pycoll.parallel.tools.activations import Activations, first_difference  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


class Wrong(nn.Linear):
    """Off by a little."""

    def forward(self, x):
        return super().forward(x) + 1e-6


def record(comm, sizes, folder, wrong, microbatches, **options):
    torch.set_num_threads(1)
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
    path = folder / f"{len(sizes)}-{wrong}-{comm.rank}.pt"
    activations.write(path)
    return path


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"dp": 1, "pp": 2}, {"recompute": True}),
        ({"dp": 1, "pp": 2, "tp": 2}, {}),
        ({"dp": 2, "pp": 1, "tp": 1}, {"zero": 3}),
    ],
)
def test_first_wrong_output_is_found_on_a_mesh_and_none_where_all_are_right(
    sizes, options, tmp_path
):
    n = 4 if len(sizes) == 3 and sizes["dp"] == 1 else 2
    one = run_ranks(record, 1, {}, tmp_path, False, 1)[0]
    right = run_ranks(record, n, sizes, tmp_path, False, 2, **options)
    assert first_difference(one, right, 1e-10) is None
    names = {call[0] for path in right for call, _ in torch.load(path)["found"]}
    assert {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "drop", "qkv")} <= names
    wrong = run_ranks(record, n, sizes, tmp_path, True, 2, **options)
    layer, rank, difference = first_difference(one, wrong, 1e-10)
    assert layer == "blocks.1.up" and rank.startswith("rank ")
    assert difference == pytest.approx(1e-6, rel=1e-3)
