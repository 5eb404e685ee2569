"""8-bit floats against the casts of ml_dtypes and torch, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cases import each_case

from pycoll import _core
from pycoll.bench.arithmetic import Array, narrow, widen

pytestmark = pytest.mark.pure

LARGEST = {"f8_e4m3": 448.0, "f8_e5m2": 57344.0}
# From here on a value is rounded to what lies above the largest one.
OVERFLOW = {"f8_e4m3": np.nextafter(np.float32(464), np.float32(500)), "f8_e5m2": np.float32(61440)}
NAMES = {"f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2"}
CODES = np.arange(256).astype(np.uint8)
of_dtypes = each_case("dtype", NAMES)


def f32_values(dtype: str) -> Array:
    """Around every point where rounding turns, at every exponent, and all that is special."""
    magnitudes = np.sort(np.abs(widen(CODES, dtype)[np.isfinite(widen(CODES, dtype))]))
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    points = np.concatenate([magnitudes, middles, [464, 480, 61440, 65536]]).astype(np.float32)
    bits = points.view(np.uint32).astype(np.int64)
    around = np.concatenate([bits + step for step in (-2, -1, 0, 1, 2)])
    dense = np.arange(0, 0x7F800000, 262139)  # a prime: all patterns of low bits
    special = np.array([0, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000])
    magnitude = np.clip(np.concatenate([around, dense, special]), 0, 0x7FFFFFFF).astype(np.uint32)
    return np.concatenate([magnitude, magnitude | 0x80000000]).view(np.float32)


@functools.cache
def stored(dtype: str) -> tuple[Array, Array]:
    """f32 values -> the dtype, through the kernel: premul takes any f32 as a factor, times 1."""
    one = np.array([0x38 if dtype == "f8_e4m3" else 0x3C], np.uint8)
    values = f32_values(dtype)
    result = np.empty(len(values), np.uint8)
    for i, value in enumerate(values.tolist()):
        _core._scale(result[i : i + 1], one, dtype, value)
    return values, result


@of_dtypes
def test_float8_of_every_f32_equals_oracle(dtype: str) -> None:
    values, got = stored(dtype)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], narrow(values[~nan], dtype))
    assert (got[nan] == (0x7F if dtype == "f8_e4m3" else 0x7E)).all()


@of_dtypes
def test_float8_of_every_f32_equals_the_cast_of_ml_dtypes(dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="compares with its casts")
    values, got = stored(dtype)
    is_number = ~np.isnan(values)
    with np.errstate(all="ignore"):
        expected = values[is_number].astype(getattr(ml_dtypes, NAMES[dtype])).view(np.uint8)
    np.testing.assert_array_equal(got[is_number], expected)


@pytest.mark.torch
@of_dtypes
def test_float8_that_does_not_overflow_equals_the_cast_of_torch(dtype: str) -> None:
    """torch 2.13 saturates e4m3fn where pycoll, ml_dtypes and older torches give NaN."""
    torch = pytest.importorskip("torch", reason="compares with its casts")
    values, got = stored(dtype)
    fits = np.abs(values) < OVERFLOW[dtype]
    cast = torch.from_numpy(values[fits]).to(getattr(torch, NAMES[dtype])).view(torch.uint8)
    np.testing.assert_array_equal(got[fits], cast.numpy())


@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
@of_dtypes
def test_float8_every_code_has_the_value_that_others_read(dtype: str, library: str) -> None:
    module = pytest.importorskip(library, reason="compares with its casts")
    if library == "torch":
        expected = module.from_numpy(CODES).view(getattr(module, NAMES[dtype])).float().numpy()
    else:
        expected = CODES.view(getattr(module, NAMES[dtype])).astype(np.float32)
    np.testing.assert_array_equal(widen(CODES, dtype), expected)


@of_dtypes
def test_float8_sum_that_overflows_is_not_hidden(dtype: str) -> None:
    most = narrow(np.full(40, LARGEST[dtype], np.float32), dtype)
    out = np.empty_like(most)
    for sign in (0, 0x80):
        _core._reduce_copy([most | sign, most | sign], [out], dtype, "sum")
        assert (out == ((0x7F if dtype == "f8_e4m3" else 0x7C) | sign)).all()
    # The accumulator is f32: what comes back into range is exact.
    _core._reduce_copy([most, most, most | 0x80], [out], dtype, "sum")
    np.testing.assert_array_equal(out, most)
