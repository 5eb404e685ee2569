"""Layout invariance: losses and weights of every mesh are those of one process, in float64."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import train  # noqa: E402

from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

TOLERANCE = 1e-10


@functools.cache
def of_one_process(**gpt):
    return run_ranks(train, 1, {}, gpt=gpt)[0]


def assert_parity(n: int, sizes: dict, gpt: dict | None = None, **options) -> None:
    losses, norms, weights = of_one_process(**(gpt or {}))
    for rank, got in enumerate(run_ranks(train, n, sizes, gpt=gpt, **options)):
        assert all(abs(a - b) <= TOLERANCE for a, b in zip(losses, got[0], strict=True)), rank
        assert all(abs(a - b) <= TOLERANCE for a, b in zip(norms, got[1], strict=True)), rank
        assert weights.keys() == got[2].keys()
        for name, weight in weights.items():
            assert (weight - got[2][name]).abs().max() <= TOLERANCE, (rank, name)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_with_zero_equals_one_process(zero):
    assert_parity(2, {}, zero=zero, recompute=zero == 3, bucket_mb=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_equals_one_process(sequence_parallel):
    assert_parity(2, {"tp": 2}, sequence_parallel=sequence_parallel)


def test_tied_and_uneven_sizes_equal_one_process():
    assert_parity(2, {"tp": 2}, gpt={"tie": True, "hidden": 37, "vocab": 31})


def test_data_and_tensor_parallel_with_zero_and_sequence_equal_one_process():
    assert_parity(4, {"tp": 2}, zero=2, sequence_parallel=True, recompute="blocks.*")


@pytest.mark.parametrize("tie", [False, True])
def test_pipeline_with_zero_and_split_backward_equals_one_process(tie):
    assert_parity(2, {"pp": 2}, gpt={"tie": tie}, schedule="zb1p", zero=3)


def test_all_at_once_equals_one_process():
    assert_parity(8, {"pp": 2, "tp": 2}, zero=1, sequence_parallel=True)
