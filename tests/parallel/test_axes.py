"""Layout invariance for products of axes with cut sequences: 20 steps in float64."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import train  # noqa: E402

from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

TOLERANCE = 1e-10
GPT = {"fused": True, "context": 16}
CASES = [
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
def of_one_process():
    return run_ranks(train, 1, {}, gpt=GPT)[0]


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=str)
def test_product_of_axes_equals_one_process(sizes, options):
    sizes = {"dp": 1, **sizes}
    n = functools.reduce(int.__mul__, sizes.values())
    losses, norms, weights = of_one_process()
    for rank, got in enumerate(run_ranks(train, n, sizes, gpt=GPT, **options)):
        assert losses == pytest.approx(got[0], rel=0, abs=TOLERANCE), rank
        assert norms == pytest.approx(got[1], rel=0, abs=TOLERANCE), rank
        assert weights.keys() == got[2].keys()
        for name, weight in weights.items():
            assert (weight - got[2][name]).abs().max() <= TOLERANCE, (rank, name)
