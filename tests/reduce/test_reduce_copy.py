"""reduce_copy against a NumPy oracle, bit for bit, on every instruction set of this CPU.

Run as a script, it prints the instruction set in use and a digest of results, for the test that
compares instruction sets.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cases import each_case

from pycoll import _core
from pycoll.bench.arithmetic import (
    CELLS,
    DTYPES,
    FLOATS,
    KIND,
    OPS,
    STORAGE,
    Array,
    oracle,
    random_values,
    scaled,
    widen,
)

pytestmark = pytest.mark.pure

NAN = {
    "f32": 0x7FC00000,
    "f64": 0x7FF8 << 48,
    "f16": 0x7E00,
    "bf16": 0x7FC0,
    "f8_e4m3": 0x7F,
    "f8_e5m2": 0x7E,
}
INFINITY = {"f32": 0x7F800000, "f64": 0x7FF << 52, "f16": 0x7C00, "bf16": 0x7F80, "f8_e5m2": 0x7C}
COUNTS = [0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, 4099]
GUARD = 0xA5


class Operand:
    """An array at a byte offset from alignment, between guard bytes that must not be written."""

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
    num_streaming: int = 0,
    offsets: Sequence[int] = (0,),
    first_to_peer: int | None = None,
    past_caches: bool = False,
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
        num_streaming,
        first_to_peer,
        past_caches,
    )
    first = to_operands[0].bytes
    for operand in to_operands:
        assert operand.guards_are_whole()
        np.testing.assert_array_equal(operand.bytes, first)
    return first.copy().view(STORAGE[dtype])


def assert_same_bits(got: Array, expected: Array, context: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8), err_msg=context)


@each_case("dtype, op", CELLS)
def test_reduce_copy_any_operands_equals_oracle(dtype: str, op: str) -> None:
    rng = np.random.default_rng([DTYPES.index(dtype), OPS.index(op)])
    for i, count in enumerate(COUNTS):
        srcs = [random_values(rng, dtype, count) for _ in range(9)]
        for num_srcs in range(1 + i % 3, 10, 3):
            divisor, num_dsts = num_srcs if op == "avg" else 1, 1 + (i + num_srcs) % 3
            offsets = [0] if rng.random() < 0.3 else rng.integers(0, 64, 12).tolist()
            got = run(srcs[:num_srcs], dtype, op, divisor, num_dsts, offsets=offsets)
            expected = oracle(srcs[:num_srcs], dtype, op, divisor)
            assert_same_bits(got, expected, f"{count=} {num_srcs=} {num_dsts=} {offsets=}")


def check_sums(dtype: str, srcs: list[Array], *how: Any) -> None:
    """The sum of the sources, reduced with each of these arguments of `run`, and the oracle's."""
    for num_srcs in (1, 3):
        expected = oracle(srcs[:num_srcs], dtype, "sum")
        for arguments in how:
            got = run(srcs[:num_srcs], dtype, "sum", 1, *arguments)
            assert_same_bits(got, expected, f"{len(expected)=} {num_srcs=} {arguments=}")


@each_case("dtype", DTYPES)
def test_reduce_copy_streaming_equals_oracle(dtype: str) -> None:
    rng = np.random.default_rng(7)
    for count in (0, 1, 100, 8191, 8193, 70001):
        srcs = [random_values(rng, dtype, count) for _ in range(3)]
        anywhere = rng.integers(0, 64, 5).tolist()
        check_sums(dtype, srcs, (1, 1, [0]), (3, 1, [16]), (3, 2, anywhere), (3, 3, anywhere))
        # All begin at the same place of a line, so they are written from the registers.
        check_sums(dtype, srcs, (1, 1, [24]), (3, 3, [16]), (2, 2, [0]))


@each_case("dtype", DTYPES)
def test_reduce_copy_to_peers_equals_oracle(dtype: str) -> None:
    rng = np.random.default_rng(8)
    for count in (0, 1, 511, 8193, 70001):
        srcs = [random_values(rng, dtype, count) for _ in range(3)]
        how = ((1, False, 0), (2, False, 1), (2, True, 1), (3, True, 1), (3, False, 0))
        for past_caches in (False, True):
            offsets = [rng.integers(0, 64, 5).tolist() for _ in how]
            arguments = (
                (*of[:2], at, of[2], past_caches) for of, at in zip(how, offsets, strict=True)
            )
            check_sums(dtype, srcs, *arguments)


@each_case("divisor", [2, 3, 7, 255, 256, 1000])
@each_case("dtype", [d for d, op in CELLS if op == "avg"])
def test_reduce_copy_divisor_divides_before_rounding(dtype: str, divisor: int) -> None:
    rng = np.random.default_rng(divisor)
    srcs = [random_values(rng, dtype, 3001) for _ in range(3)]
    for num_srcs in (1, 3):
        got = run(srcs[:num_srcs], dtype, "avg", divisor)
        assert_same_bits(got, oracle(srcs[:num_srcs], dtype, "avg", divisor), f"{num_srcs=}")


@each_case("num_streaming", [0, 1, 2])
@each_case("dtype", DTYPES)
def test_reduce_copy_destination_is_a_source_equals_oracle(dtype: str, num_streaming: int) -> None:
    rng = np.random.default_rng(11)
    for count in (1, 65, 4099, 20000):
        for num_srcs in (1, 2, 5):
            values = [random_values(rng, dtype, count) for _ in range(num_srcs)]
            expected = oracle(values, dtype, "sum").view(np.uint8)
            for alias, position in [(a, p) for a in {0, num_srcs - 1} for p in (0, 1)]:
                # 24 bytes off: aligned for no vector, so that the head is partial.
                operands = [Operand(v, 24) for v in values]
                dsts = [Operand(values[0], 48).bytes, Operand(values[0], 0).bytes]
                dsts[position] = operands[alias].bytes
                srcs = [operand.bytes for operand in operands]
                _core._reduce_copy(srcs, dsts, dtype, "sum", 1, num_streaming)
                context = f"{count=} {num_srcs=} {alias=} {position=}"
                for dst in dsts:
                    np.testing.assert_array_equal(dst, expected, err_msg=context)
                assert all(operand.guards_are_whole() for operand in operands)


@each_case("dtype", [d for d in FLOATS if np.dtype(STORAGE[d]).itemsize <= 2])
def test_reduce_copy_every_small_float_survives_the_round_trip(dtype: str) -> None:
    uint = np.dtype(f"u{np.dtype(STORAGE[dtype]).itemsize}")
    sign = 1 << (8 * uint.itemsize - 1)
    every = np.arange(2 * sign).astype(uint)
    minus_zero = np.full_like(every, sign)
    got = run([every, minus_zero], dtype, "sum").view(uint)
    largest, nan = INFINITY.get(dtype, 0x7E), NAN[dtype]
    expected = np.where((every & (sign - 1)) > largest, nan, every)
    np.testing.assert_array_equal(got, expected)


@each_case("dtype, op", [(d, op) for d, op in CELLS if d in FLOATS])
def test_reduce_copy_zeros_infinities_and_nans_equal_oracle(dtype: str, op: str) -> None:
    """Signed zeros are ordered, and a NaN of any payload becomes the canonical one."""
    uint = np.dtype(f"u{np.dtype(STORAGE[dtype]).itemsize}")
    nan, infinity = NAN[dtype], INFINITY.get(dtype, 0x7E)  # f8_e4m3: the largest value
    minus = 1 << (8 * uint.itemsize - 1)
    codes = [c | sign for c in (0, infinity, infinity | 1, nan, nan | 3) for sign in (0, minus)]
    a, b = (x.ravel().view(STORAGE[dtype]) for x in np.meshgrid(*2 * [np.array(codes, uint)]))
    got = run([a, b], dtype, op)
    assert_same_bits(got, oracle([a, b], dtype, op), "all pairs")
    nans = np.isnan(np.asarray(widen(a, dtype))) | np.isnan(np.asarray(widen(b, dtype)))
    assert nans.any() and (got.view(uint)[nans] == nan).all()
    zeros = [got.view(uint)[(a.view(uint) == x) & (b.view(uint) == y)] for x in (0, minus)
             for y in (0, minus)]  # fmt: skip
    if op in ("min", "max"):
        expected = [0, minus, minus, minus] if op == "min" else [0, 0, 0, minus]
        assert [int(zero[0]) for zero in zeros] == expected


def test_reduce_copy_bools_of_other_bytes_become_zero_or_one() -> None:
    """Any byte but 0 is true; what was computed is 0 or 1."""
    values = np.arange(256).astype(np.uint8)
    for op in (op for d, op in CELLS if d == "bool"):
        for other in (0, 1, 2, 128):
            srcs = [values, np.full_like(values, other), values[::-1].copy()]
            got = run(srcs, "bool", op)
            assert_same_bits(got, oracle(srcs, "bool", op), f"{op=} {other=}")
            assert got.max() <= 1


def run_scale(values: Array, dtype: str, factor: float, offset: int = 0) -> Array:
    source, target = Operand(values, offset), Operand(np.zeros_like(values), 3 * offset % 64)
    _core._scale(target.bytes, source.bytes, dtype, factor)
    assert target.guards_are_whole()
    np.testing.assert_array_equal(source.bytes, values.view(np.uint8))
    _core._scale(source.bytes, source.bytes, dtype, factor)  # in place
    np.testing.assert_array_equal(source.bytes, target.bytes)
    assert source.guards_are_whole()
    return target.bytes.copy().view(STORAGE[dtype])


@each_case("dtype", [d for d, op in CELLS if op == "premul"])
def test_scale_equals_oracle(dtype: str) -> None:
    rng = np.random.default_rng(13)
    whole, any_number = [0, 1, 3, 127], [0.5, -1.0, 1 / 3, -0.0, 1e30, float("inf")]
    negative = [-1, -7, -128] if not dtype.startswith("u") else [255]
    factors = whole + (any_number if KIND[dtype] in ("float", "complex") else negative)
    for count in COUNTS:
        for factor in factors:
            values = random_values(rng, dtype, count)
            got = run_scale(values, dtype, factor, int(rng.integers(0, 64)))
            assert_same_bits(got, scaled(values, dtype, factor), f"{count=} {factor=}")


@each_case("streaming", [False, True])
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
            for op in (op for d, op in CELLS if d == dtype):
                sha.update(run(srcs, dtype, op, 5 if op == "avg" else 1).tobytes())
                if op == "premul":
                    sha.update(run_scale(srcs[0], dtype, 3).tobytes())
    return sha.hexdigest()


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYCOLL_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_reduce_copy_every_isa_gives_the_same_bits() -> None:
    digests = {}
    limits = ("avx512", "avx2", "generic")
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run_with_isa, limits))
    for limit, result in zip(limits, results, strict=True):
        assert result.returncode == 0, result.stderr
        isa, digests[limit] = result.stdout.split()
        # Lowered to the limit, or further on a CPU that lacks it.
        assert limit != "generic" or isa == "generic"
    assert len(set(digests.values())) == 1, digests


def test_reduce_copy_unknown_isa_raises() -> None:
    result = run_with_isa("mmx")
    assert result.returncode != 0
    assert "PYCOLL_ISA=mmx: expected one of generic avx2 avx512" in result.stderr


if __name__ == "__main__":
    print(_core.reduce_copy_isa(), digest())
