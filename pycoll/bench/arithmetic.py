"""Dtypes and reductions in NumPy alone: the expected result of every cell of dtypes x ops.

f16 is NumPy's. bf16 and the 8-bit floats, which NumPy lacks, are encoded here as their bits. The
tables are written independently of the core; a test compares them with the core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# By name: what the elements are, and the type that stores them; small floats are their bits.
_TABLE = {
    "f32": ("float", np.float32),
    "f64": ("float", np.float64),
    "f16": ("float", np.float16),
    "bf16": ("float", np.uint16),
    "f8_e4m3": ("float", np.uint8),
    "f8_e5m2": ("float", np.uint8),
    "i8": ("int", np.int8),
    "i16": ("int", np.int16),
    "i32": ("int", np.int32),
    "i64": ("int", np.int64),
    "u8": ("uint", np.uint8),
    "u16": ("uint", np.uint16),
    "u32": ("uint", np.uint32),
    "u64": ("uint", np.uint64),
    "bool": ("bool", np.uint8),
    "c64": ("complex", np.complex64),
    "c128": ("complex", np.complex128),
}
DTYPES = list(_TABLE)
KIND: dict[str, str] = {name: kind for name, (kind, _) in _TABLE.items()}
STORAGE = {name: storage for name, (_, storage) in _TABLE.items()}
ITEMSIZE = {name: np.dtype(storage).itemsize for name, storage in STORAGE.items()}
FLOATS = [name for name in DTYPES if KIND[name] == "float"]

BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
OPS = ["sum", "prod", "min", "max", "avg", *BITWISE, "premul"]
_IMPOSSIBLE = {
    "float": set(BITWISE),
    "complex": {"min", "max", *BITWISE},
    "bool": {"avg", "premul"},
}
CELLS = [(d, op) for d in DTYPES for op in OPS if op not in _IMPOSSIBLE.get(KIND[d], ())]

# Up to this magnitude every whole number is exact; in the other dtypes up to 2^24 or more.
EXACT = {"f8_e5m2": 8, "f8_e4m3": 16, "bf16": 256, "f16": 2048}

# Bits of mantissa, bias, bits of the canonical NaN.
SMALL = {"bf16": (7, 127, 0x7FC0), "f8_e4m3": (3, 7, 0x7F), "f8_e5m2": (2, 15, 0x7E)}


def _values(dtype: str) -> NDArray[np.float64]:
    """The value of every code with the sign bit clear, read as if there were no infinity and NaN:
    the first of those codes is the result of a rounding that overflows."""
    mantissa_bits, bias, _ = SMALL[dtype]
    code = np.arange(1 << (8 * ITEMSIZE[dtype] - 1))
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    significand = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return significand * 2.0 ** (np.maximum(exponent, 1) - bias)


VALUES = {dtype: _values(dtype) for dtype in SMALL}


def first_special(dtype: str) -> int:
    """The code of infinity, or of NaN where there is no infinity."""
    if dtype == "f8_e4m3":
        return 0x7F
    return len(VALUES[dtype]) - (1 << SMALL[dtype][0])


def widen(stored: Array, dtype: str) -> Array:
    """The values that are computed with: small floats as f32, bools as NumPy's."""
    if dtype == "bool":
        return stored != 0
    if dtype == "f16":
        return stored.astype(np.float32)
    if dtype not in SMALL:
        return stored
    sign = 1 << (8 * stored.dtype.itemsize - 1)
    code = (stored & (sign - 1)).astype(np.int64)
    value = VALUES[dtype].copy()
    special = first_special(dtype)
    value[special:] = np.nan
    if dtype != "f8_e4m3":
        value[special] = np.inf
    return np.where(stored & sign, -value[code], value[code]).astype(np.float32)


def narrow(x: Array, dtype: str) -> Array:
    """The code whose value is nearest to x, compared in f64; ties go to the even code."""
    if dtype not in SMALL:
        return x.astype(STORAGE[dtype])
    storage = np.dtype(STORAGE[dtype])
    special = first_special(dtype)
    grid = VALUES[dtype][: special + 1]
    magnitude = np.abs(np.nan_to_num(x.astype(np.float64), nan=0))
    above = np.clip(np.searchsorted(grid, magnitude), 1, special)
    to_below, to_above = magnitude - grid[above - 1], grid[above] - magnitude
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(take_above, above, above - 1)
    code |= np.where(np.signbit(x), 1 << (8 * storage.itemsize - 1), 0)
    return np.where(np.isnan(x), SMALL[dtype][2], code).astype(storage)


def canonical(x: Array) -> Array:
    """Every NaN as the quiet one without a sign, in each part of a complex number."""
    if np.iscomplexobj(x):
        parts = x.view(x.real.dtype)
        return np.where(np.isnan(parts), parts.dtype.type(np.nan), parts).view(x.dtype)
    if x.dtype.kind == "f":
        return np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return x


def multiply(a: Array, b: Array) -> Array:
    """As NumPy, but a complex product without fused operations or rescue of infinities."""
    if not np.iscomplexobj(a):
        return a * b
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def combine(op: str, a: Array, b: Array) -> Array:
    """`a op b`. A bool is a number of one bit: its sum is an or, its product an and."""
    if op in ("sum", "avg", "premul"):
        return a + b
    if op == "prod":
        return multiply(a, b)
    if op in BITWISE:
        return BITWISE[op](a, b)
    extreme = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    if a.dtype.kind != "f":
        return extreme
    first_wins = np.signbit(a) if op == "min" else ~np.signbit(a)
    return np.where(a == b, np.where(first_wins, a, b), extreme)


def divide(acc: Array, divisor: int) -> Array:
    """Integers are rounded towards zero."""
    if divisor == 1:
        return acc
    if np.iscomplexobj(acc):
        return divide(acc.view(acc.real.dtype), divisor).view(acc.dtype)
    if acc.dtype.kind == "f":
        return acc / acc.dtype.type(divisor)
    if acc.dtype.kind == "u":
        return (acc.astype(np.uint64) // np.uint64(divisor)).astype(acc.dtype)
    wide = acc.astype(np.int64)
    return (wide // divisor + ((wide % divisor != 0) & (wide < 0))).astype(acc.dtype)


def oracle(srcs: Sequence[Array], dtype: str, op: str, divisor: int = 1) -> Array:
    """((s0 op s1) op s2) ..., divided, small floats in f32 and rounded once; NaNs are canonical.

    Args:
        srcs: Operands, shape (count,), of the storage type of `dtype`.
        dtype: Name of the dtype.
        op: Name of the op.
        divisor: The results are divided by it.

    Returns:
        The result, shape (count,), of the storage type.
    """
    if len(srcs) == 1 and divisor == 1:
        return srcs[0].copy()
    with np.errstate(all="ignore"):
        widened = [widen(s, dtype) for s in srcs]
        acc = widened[0]
        for source in widened[1:]:
            acc = combine(op, acc, source)
        return narrow(canonical(divide(acc, divisor)), dtype)


def reduced(values: np.ndarray, op: str) -> np.ndarray:
    """Reduces the first axis in order; floats in f64, integers with wrap-around in their type."""
    if values.dtype.kind not in "biu":
        values = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
    total = values[0]
    with np.errstate(over="ignore"):
        for value in values[1:]:
            total = combine(op, total, value)
    return divide(total, len(values)) if op == "avg" else total


def scaled(stored: Array, dtype: str, factor: float) -> Array:
    """The first step of premul: stored * factor, rounded once, NaNs canonical."""
    with np.errstate(all="ignore"):
        x = widen(stored, dtype)
        if np.iscomplexobj(x):
            parts = x.view(x.real.dtype)
            return canonical((parts * parts.dtype.type(factor)).view(x.dtype))
        if x.dtype.kind != "f":
            wrapped = int(factor) % (1 << (8 * x.dtype.itemsize))
            unsigned = x.view(f"u{x.dtype.itemsize}")
            return (unsigned * unsigned.dtype.type(wrapped)).view(x.dtype)
        return narrow(canonical(x * x.dtype.type(factor)), dtype)


def random_values(rng: np.random.Generator, dtype: str, count: int) -> Array:
    """Any bits (infinities, NaNs, subnormals) in one half, values near 1 in the other."""
    storage = np.dtype(STORAGE[dtype])
    any_bits = np.frombuffer(rng.bytes(count * storage.itemsize), storage)
    if dtype == "bool":
        return any_bits & 1
    if KIND[dtype] == "complex":
        part = storage.type(0).real.dtype
        return _half_near_one(rng, any_bits.view(part), "f32").view(storage)
    return _half_near_one(rng, any_bits, dtype) if dtype in FLOATS else any_bits


def _half_near_one(rng: np.random.Generator, any_bits: Array, dtype: str) -> Array:
    near_one = rng.normal(size=any_bits.shape).astype(np.float32)
    stored = narrow(near_one, dtype).astype(any_bits.dtype)
    return np.where(rng.random(any_bits.shape) < 0.5, any_bits, stored)
