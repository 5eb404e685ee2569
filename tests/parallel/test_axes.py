"""Layout invariance for products of axes with cut sequences and experts: 20 steps in float64."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import train  # noqa: E402

from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

TOLERANCE = 1e-10
GPT = {"fused": True, "context": 16}
# tp leaves what is within experts whole, where it shares sequences out.
NO_EXPERTS = {
    "*.qkv": "qkv", "blocks.[02].up": "col", "*.out|blocks.[02].down": "row", "token|head": "vocab",
}  # fmt: skip
CASES = [
    ({"ep": 2}, {"zero": 2}),
    ({"ep": 5}, {}),
    ({"dp": 2, "ep": 2}, {"zero": 0}),
    ({"dp": 2, "ep": 2}, {"zero": 1, "recompute": True}),
    ({"dp": 2, "ep": 2}, {"zero": 2}),
    ({"dp": 2, "ep": 2}, {"zero": 3, "recompute": True}),
    ({"ep": 2, "cp": 2}, {"zero": 3}),
    ({"ep": 2, "tp": 2}, {"zero": 1}),
    ({"ep": 2, "pp": 2}, {"schedule": "1f1b", "zero": 1}),
    ({"ep": 2, "pp": 2}, {"schedule": "gpipe", "zero": 3, "recompute": True}),
    ({"ep": 2, "pp": 2}, {"schedule": "zbv", "zero": 2}),
    ({"dp": 2, "ep": 2, "cp": 2}, {"zero": 2}),
    ({"dp": 2, "ep": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2, "ep": 2, "pp": 2}, {"schedule": "1f1b", "zero": 1}),
    ({"ep": 2, "cp": 2, "tp": 2}, {"zero": 1, "recompute": True}),
    ({"ep": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True, "tp": NO_EXPERTS}),
    ({"ep": 2, "cp": 2, "pp": 2}, {"schedule": "gpipe", "zero": 2}),
    ({"ep": 2, "pp": 2, "tp": 2}, {"schedule": "1f1b", "recompute": True}),
    ({"cp": 2}, {}),
    ({"cp": 8}, {"zero": 2}),
    ({"dp": 2, "cp": 2}, {"zero": 0}),
    ({"dp": 2, "cp": 2}, {"zero": 1, "recompute": True}),
    ({"dp": 2, "cp": 2}, {"zero": 2}),
    ({"dp": 2, "cp": 2}, {"zero": 3, "recompute": True}),
    ({"cp": 2, "tp": 2}, {"zero": 3}),
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "recompute": True}),
    ({"cp": 2, "pp": 2}, {"schedule": "1f1b", "zero": 1}),
    ({"cp": 2, "pp": 2}, {"schedule": "gpipe", "zero": 3, "recompute": True}),
    ({"cp": 2, "pp": 2}, {"schedule": "zbv"}),
    ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 1}),
    ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
    ({"dp": 2, "cp": 2, "pp": 2}, {"schedule": "1f1b", "zero": 2}),
    ({"dp": 2, "cp": 2, "pp": 2}, {"schedule": "gpipe", "recompute": True}),
    ({"cp": 2, "pp": 2, "tp": 2}, {"schedule": "1f1b", "zero": 3, "recompute": True}),
    ({"cp": 2, "pp": 2, "tp": 2}, {"schedule": "gpipe", "sequence_parallel": True}),
]


@functools.cache
def of_one_process(experts: int):
    return run_ranks(train, 1, {}, gpt={**GPT, "experts": experts}, batch=16)[0]


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=str)
def test_product_of_axes_equals_one_process(sizes, options):
    sizes, experts = {"dp": 1, **sizes}, 5 if "ep" in sizes else 0
    n = functools.reduce(int.__mul__, sizes.values())
    gpt = {**GPT, "experts": experts}
    losses, norms, weights = of_one_process(experts)
    for rank, got in enumerate(run_ranks(train, n, sizes, gpt=gpt, batch=16, **options)):
        assert losses == pytest.approx(got[0], rel=0, abs=TOLERANCE), rank
        assert norms == pytest.approx(got[1], rel=0, abs=TOLERANCE), rank
        assert weights.keys() == got[2].keys()
        for name, weight in weights.items():
            assert (weight - got[2][name]).abs().max() <= TOLERANCE, (rank, name)
