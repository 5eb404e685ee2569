"""reduce_copy against a NumPy oracle, bit for bit, on every instruction set of this CPU.

Run as a script, it prints the instruction set in use and a digest of results, for the test that
compares instruction sets.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pycoll import _core

pytestmark = pytest.mark.pure

Array = NDArray[np.generic]

DTYPES: list[str] = _core._reduce_dtypes()
OPS: list[str] = _core._reduce_ops()
COUNTS = [0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, 4099]
GUARD = 0xA5

# Storage type; bf16 is its bits. A dtype that the core gains needs a row here.
STORAGE = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": np.uint16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
}
FLOATS = ("f32", "f64", "f16", "bf16")


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """The nearer of the two neighbours of x, compared in f64; of two as near, the even one."""
    below = x.view(np.uint32) & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    # The neighbour above the largest finite value is where 2^128 would be, stored as infinity.
    near, far = below.view(np.float32).astype(np.float64), above.view(np.float32)
    far = np.where(np.isfinite(far), far.astype(np.float64), np.copysign(2.0**128, near))
    to_near, to_far = np.abs(x - near), np.abs(far - x)
    odd = (below >> 16) & 1 == 1
    bits = np.where((to_far < to_near) | ((to_far == to_near) & odd), above, below)
    bits = np.where(np.isinf(x), x.view(np.uint32), bits)
    return np.where(np.isnan(x), 0x7FC0, bits >> 16).astype(np.uint16)


def combine(op: str, a: Array, b: Array) -> Array:
    if op in ("sum", "avg"):
        return a + b
    if op == "prod":
        return a * b
    first_wins = np.signbit(a) if op == "min" else ~np.signbit(a)
    extreme = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    return np.where(a == b, np.where(first_wins, a, b), extreme)


def oracle(srcs: Sequence[Array], dtype: str, op: str, divisor: int = 1) -> Array:
    """((s0 op s1) op s2) ..., divided, 16-bit floats in f32; NaNs are canonical.

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
    with np.errstate(all="ignore"):
        widened = [
            bf16_to_f32(s) if dtype == "bf16" else s.astype(np.float32) if dtype == "f16" else s
            for s in srcs
        ]
        acc = widened[0]
        for source in widened[1:]:
            acc = combine(op, acc, source)
        if divisor != 1 and dtype in FLOATS:
            acc = acc / acc.dtype.type(divisor)
        elif divisor != 1:
            wide = acc.astype(np.int64)
            toward_zero = wide // divisor + ((wide % divisor != 0) & (wide < 0))
            acc = toward_zero.astype(acc.dtype)
        if dtype in FLOATS:
            acc = np.where(np.isnan(acc), acc.dtype.type(np.nan), acc)
        if dtype == "bf16":
            return f32_to_bf16(acc)
        return acc.astype(STORAGE[dtype])


def random_values(rng: np.random.Generator, dtype: str, count: int) -> Array:
    """Any bits (infinities, NaNs, subnormals) in one half, values near 1 in the other."""
    storage = np.dtype(STORAGE[dtype])
    any_bits = np.frombuffer(rng.bytes(count * storage.itemsize), storage)
    if dtype not in FLOATS:
        return any_bits
    near_one = rng.normal(size=count).astype(np.float32)
    near_one_stored = f32_to_bf16(near_one) if dtype == "bf16" else near_one.astype(storage)
    return np.where(rng.random(count) < 0.5, any_bits, near_one_stored)


class Operand:
    """An array at a byte offset from alignment, between guard bytes that nobody may write."""

    def __init__(self, values: Array, offset: int) -> None:
        self.pages = np.full(values.nbytes + 256, GUARD, np.uint8)
        begin = -self.pages.ctypes.data % 64 + 64 + offset
        self.bytes = self.pages[begin : begin + values.nbytes]
        self.bytes[:] = values.view(np.uint8)
        self.guards = (self.pages[:begin], self.pages[begin + values.nbytes :])

    def guards_are_whole(self) -> bool:
        return all(bool((guard == GUARD).all()) for guard in self.guards)


def run(
    srcs: Sequence[Array],
    dtype: str,
    op: str,
    divisor: int = 1,
    num_dsts: int = 1,
    streaming: bool = False,
    offsets: Sequence[int] = (0,),
) -> Array:
    """reduce_copy, operand i at offsets[i % len] bytes; all dsts must agree, all guards hold."""
    offset = [offsets[i % len(offsets)] for i in range(len(srcs) + num_dsts)]
    from_operands = [Operand(s, o) for s, o in zip(srcs, offset, strict=False)]
    blank = np.zeros_like(srcs[0])
    to_operands = [Operand(blank, o) for o in offset[len(srcs) :]]
    _core._reduce_copy(
        [s.bytes for s in from_operands],
        [d.bytes for d in to_operands],
        dtype,
        op,
        divisor,
        streaming,
    )
    first = to_operands[0].bytes
    for operand in to_operands:
        assert operand.guards_are_whole()
        np.testing.assert_array_equal(operand.bytes, first)
    return first.copy().view(STORAGE[dtype])


def assert_same_bits(got: Array, expected: Array, context: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8), err_msg=context)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_copy_any_operands_equals_oracle(dtype: str, op: str) -> None:
    rng = np.random.default_rng([DTYPES.index(dtype), OPS.index(op)])
    for count in COUNTS:
        srcs = [random_values(rng, dtype, count) for _ in range(9)]
        for num_srcs in range(1, 10):
            divisor = num_srcs if op == "avg" else 1
            expected = oracle(srcs[:num_srcs], dtype, op, divisor)
            for num_dsts in (1, 2, 3):
                offsets = [0] if rng.random() < 0.3 else rng.integers(0, 64, 12).tolist()
                got = run(srcs[:num_srcs], dtype, op, divisor, num_dsts, offsets=offsets)
                context = f"{count=} {num_srcs=} {num_dsts=} {offsets=}"
                assert_same_bits(got, expected, context)


@pytest.mark.parametrize("num_dsts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_copy_streaming_equals_oracle(dtype: str, num_dsts: int) -> None:
    rng = np.random.default_rng(7)
    for count in (0, 1, 100, 8191, 8193, 70001):
        srcs = [random_values(rng, dtype, count) for _ in range(3)]
        for num_srcs in (1, 3):
            for offsets in ([0], [16], rng.integers(0, 64, 5).tolist()):
                got = run(srcs[:num_srcs], dtype, "sum", 1, num_dsts, True, offsets)
                expected = oracle(srcs[:num_srcs], dtype, "sum")
                assert_same_bits(got, expected, f"{count=} {num_srcs=} {offsets=}")


@pytest.mark.parametrize("divisor", [2, 3, 7, 255, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_copy_divisor_divides_before_rounding(dtype: str, divisor: int) -> None:
    rng = np.random.default_rng(divisor)
    srcs = [random_values(rng, dtype, 3001) for _ in range(3)]
    for num_srcs in (1, 3):
        got = run(srcs[:num_srcs], dtype, "avg", divisor)
        assert_same_bits(got, oracle(srcs[:num_srcs], dtype, "avg", divisor), f"{num_srcs=}")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_copy_destination_is_a_source_equals_oracle(dtype: str, streaming: bool) -> None:
    rng = np.random.default_rng(11)
    for count in (1, 17, 65, 4099, 20000):
        for num_srcs in (1, 2, 5):
            values = [random_values(rng, dtype, count) for _ in range(num_srcs)]
            expected = oracle(values, dtype, "sum").view(np.uint8)
            for alias in range(num_srcs):
                for position in (0, 1):
                    # 24 bytes off: aligned for no vector, so that the head is partial.
                    operands = [Operand(v, 24) for v in values]
                    dsts = [Operand(values[0], 48).bytes, Operand(values[0], 0).bytes]
                    dsts[position] = operands[alias].bytes
                    srcs = [operand.bytes for operand in operands]
                    _core._reduce_copy(srcs, dsts, dtype, "sum", 1, streaming)
                    context = f"{count=} {num_srcs=} {alias=} {position=}"
                    for dst in dsts:
                        np.testing.assert_array_equal(dst, expected, err_msg=context)
                    assert all(operand.guards_are_whole() for operand in operands)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_reduce_copy_every_16_bit_float_survives_the_round_trip(dtype: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    minus_zero = np.full_like(every, 0x8000)
    got = run([every, minus_zero], dtype, "sum").view(np.uint16)
    exponent, nan = (0x7C00, 0x7E00) if dtype == "f16" else (0x7F80, 0x7FC0)
    expected = np.where((every & 0x7FFF) > exponent, nan, every)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_copy_signed_zeros_are_ordered(dtype: str) -> None:
    uint = np.dtype(f"u{np.dtype(STORAGE[dtype]).itemsize}")
    minus = uint.type(1 << (8 * uint.itemsize - 1))
    a = np.array([0, 0, minus, minus], uint)
    b = np.array([0, minus, 0, minus], uint)
    for op, expected in (("min", [0, minus, minus, minus]), ("max", [0, 0, 0, minus])):
        got = run([a.view(STORAGE[dtype]), b.view(STORAGE[dtype])], dtype, op)
        np.testing.assert_array_equal(got.view(uint), np.array(expected, uint), err_msg=op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_copy_nan_of_any_payload_becomes_the_canonical_one(dtype: str, op: str) -> None:
    uint = np.dtype(f"u{np.dtype(STORAGE[dtype]).itemsize}")
    nan = {"f32": 0x7FC00000, "f64": 0x7FF8 << 48, "f16": 0x7E00, "bf16": 0x7FC0}[dtype]
    infinity = {"f32": 0x7F800000, "f64": 0x7FF << 52, "f16": 0x7C00, "bf16": 0x7F80}[dtype]
    minus = 1 << (8 * uint.itemsize - 1)
    nans = np.array([nan, nan | minus, infinity | 1, infinity | 1 | minus, nan | 3], uint)
    others = np.array([0, minus, infinity, infinity | minus, nan | 5], uint)
    for a, b in ((nans, others), (others, nans)):
        got = run([a.view(STORAGE[dtype]), b.view(STORAGE[dtype])], dtype, op)
        np.testing.assert_array_equal(got.view(uint), np.full(len(nans), nan, uint))


@pytest.mark.parametrize("streaming", [False, True])
def test_copy_bytes_any_size_and_alignment_copies(streaming: bool) -> None:
    rng = np.random.default_rng(5)
    for nbytes in [*range(0, 300), 4095, 4096, 4097, 100_003]:
        source = Operand(rng.integers(0, 256, nbytes, np.uint8), int(rng.integers(0, 64)))
        target = Operand(np.zeros(nbytes, np.uint8), int(rng.integers(0, 64)))
        _core._copy_bytes(target.bytes, source.bytes, streaming)
        np.testing.assert_array_equal(target.bytes, source.bytes, err_msg=f"{nbytes=}")
        assert target.guards_are_whole()
        before = source.bytes.copy()
        _core._copy_bytes(source.bytes, source.bytes, streaming)
        np.testing.assert_array_equal(source.bytes, before, err_msg=f"{nbytes=}")


def test_reduce_copy_operands_of_two_sizes_raises() -> None:
    with pytest.raises(ValueError, match="expected operands of one size"):
        _core._reduce_copy([np.zeros(4, np.uint8)], [np.zeros(8, np.uint8)], "f32", "sum")


def digest() -> str:
    """A digest of the results of every dtype, op and length of remainder, from fixed operands."""
    sha = hashlib.sha256()
    for dtype in DTYPES:
        rng = np.random.default_rng(3)
        for count in (*range(1, 70), 1000):
            srcs = [random_values(rng, dtype, count) for _ in range(5)]
            for op in OPS:
                sha.update(run(srcs, dtype, op, 5 if op == "avg" else 1).tobytes())
    return sha.hexdigest()


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYCOLL_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_reduce_copy_every_isa_gives_the_same_bits() -> None:
    digests = {}
    for limit in ("avx512", "avx2", "generic"):
        result = run_with_isa(limit)
        assert result.returncode == 0, result.stderr
        isa, digests[limit] = result.stdout.split()
        # Lowered to the limit, or further on a CPU that lacks it.
        assert limit != "generic" or isa == "generic"
    assert len(set(digests.values())) == 1, digests


def test_reduce_copy_unknown_isa_raises() -> None:
    result = run_with_isa("mmx")
    assert result.returncode != 0
    assert "PYCOLL_ISA=mmx: not an instruction set" in result.stderr


if __name__ == "__main__":
    print(_core.reduce_copy_isa(), digest())
