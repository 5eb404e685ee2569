"""Layout invariance once more, for every factorisation of 8 ranks: 20 steps in float64."""

from __future__ import annotations

import functools
import itertools

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import train  # noqa: E402

from pycoll import run_ranks  # noqa: E402
from pycoll.parallel import pipeline  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

TOLERANCE = 1e-10
LAYOUTS = [
    (dp, tp, 8 // dp // tp) for dp, tp in itertools.product((1, 2, 4, 8), repeat=2) if dp * tp <= 8
]
SCHEDULES = [
    name
    for name in pipeline.names()
    if not pipeline.build(name, 2, 2, pipeline.generator(name).default_stages).updates
]
BATCH = 16


def depth_for(pp: int) -> int:
    return 16 if pp == 8 else 8


@functools.cache
def of_one_process(depth: int):
    return run_ranks(train, 1, {}, batch=BATCH, gpt={"depth": depth})[0]


def assert_parity(dp: int, tp: int, pp: int, **options) -> None:
    gpt = {"depth": depth_for(pp)}
    losses, norms, weights = of_one_process(gpt["depth"])
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    for rank, got in enumerate(run_ranks(train, 8, sizes, batch=BATCH, gpt=gpt, **options)):
        where = (rank, options)
        assert all(abs(a - b) <= TOLERANCE for a, b in zip(losses, got[0], strict=True)), where
        assert all(abs(a - b) <= TOLERANCE for a, b in zip(norms, got[1], strict=True)), where
        assert weights.keys() == got[2].keys()
        for name, weight in weights.items():
            assert (weight - got[2][name]).abs().max() <= TOLERANCE, (where, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
def test_every_zero_equals_one_process(dp, tp, pp, recompute):
    for zero in range(4):
        assert_parity(dp, tp, pp, zero=zero, recompute=recompute)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("dp", "tp", "pp"), [layout for layout in LAYOUTS if layout[2] > 1])
def test_every_schedule_equals_one_process(dp, tp, pp, schedule):
    for recompute in (False, True):
        assert_parity(dp, tp, pp, schedule=schedule, zero=1, recompute=recompute)


@pytest.mark.parametrize(("dp", "tp", "pp"), [layout for layout in LAYOUTS if layout[1] > 1])
def test_sequence_parallel_equals_one_process(dp, tp, pp):
    assert_parity(dp, tp, pp, sequence_parallel=True, zero=2)
