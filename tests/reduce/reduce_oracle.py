"""NumPy's answers for every cell of the table dtypes x ops, and operands to ask about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pycoll import _core

Array = NDArray[np.generic]

KIND: dict[str, str] = {name: kind for name, kind, _ in _core.dtypes()}
DTYPES = list(KIND)
OPS: list[str] = _core.ops()
CELLS = [(d, op) for d in DTYPES for op in OPS if _core.why_unsupported(d, op) == ""]
FLOATS = [d for d in DTYPES if KIND[d] == "float"]

# Storage type; small floats are their bits. A dtype that the core gains needs a row here.
STORAGE = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": np.uint16,
    "f8_e4m3": np.uint8,
    "f8_e5m2": np.uint8,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "bool": np.uint8,
    "c64": np.complex64,
    "c128": np.complex128,
}
# Bits of mantissa, bias, bits of the canonical NaN, and the code that 2^emax * 2 would have.
SMALL = {"bf16": (7, 127, 0x7FC0), "f8_e4m3": (3, 7, 0x7F), "f8_e5m2": (2, 15, 0x7E)}


def _values(dtype: str) -> NDArray[np.float64]:
    """The value of every code with the sign bit clear, read as if there were no infinity and NaN:
    the first of those codes is where rounding leads that overflows."""
    mantissa_bits, bias, _ = SMALL[dtype]
    code = np.arange(1 << (8 * np.dtype(STORAGE[dtype]).itemsize - 1))
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    significand = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return significand * 2.0 ** (np.maximum(exponent, 1) - bias)


VALUES = {dtype: _values(dtype) for dtype in SMALL}


def first_special(dtype: str) -> int:
    """The code of infinity, or of NaN where there is none."""
    if dtype == "f8_e4m3":
        return 0x7F
    return len(VALUES[dtype]) - (1 << SMALL[dtype][0])


def widen(stored: Array, dtype: str) -> Array:
    """As what is computed with: small floats as f32, bools as 0 and 1."""
    if dtype == "bool":
        return (stored != 0).astype(np.uint8)
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
    """The code whose value is nearest to x, compared in f64; of two as near, the even one."""
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
    """Every NaN the quiet one without a sign, in each part of a complex number."""
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
    if op in ("sum", "avg", "premul"):
        return a + b
    if op == "prod":
        return multiply(a, b)
    if op in ("band", "bor", "bxor"):
        return {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op](a, b)
    first_wins = np.signbit(a) if op == "min" else ~np.signbit(a)
    extreme = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    if a.dtype.kind != "f":
        return extreme
    return np.where(a == b, np.where(first_wins, a, b), extreme)


def divide(acc: Array, divisor: int) -> Array:
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


# A bool is a number of one bit: its sum is an or, its product an and.
LOGICAL = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}


def oracle(srcs: Sequence[Array], dtype: str, op: str, divisor: int = 1) -> Array:
    """((s0 op s1) op s2) ..., divided, small floats in f32 and rounded once; NaNs are canonical.

    Args:
        srcs: Operands, shape (count,), of the storage type of `dtype`.
        dtype: Name of the dtype.
        op: Name of the op.
        divisor: What the results are divided by.

    Returns:
        The result, shape (count,), of the storage type.
    """
    if len(srcs) == 1 and divisor == 1:
        return srcs[0].copy()
    if dtype == "bool":
        op = LOGICAL.get(op, op)
    with np.errstate(all="ignore"):
        widened = [widen(s, dtype) for s in srcs]
        acc = widened[0]
        for source in widened[1:]:
            acc = combine(op, acc, source)
        return narrow(canonical(divide(acc, divisor)), dtype)


def scaled(stored: Array, dtype: str, factor: float) -> Array:
    """What premul does first: stored * factor, rounded once, NaNs canonical."""
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
