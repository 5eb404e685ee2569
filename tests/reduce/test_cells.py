"""Every cell of the table dtypes x ops: it can be reduced, or it says why not."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

import pycoll
from pycoll import UsageError, _core
from pycoll.bench.arithmetic import CELLS, DTYPES, KIND, OPS

pytestmark = pytest.mark.pure

# What the message of an impossible cell says, by the kind of the dtype.
REASONS = {
    ("float", "band"): "integer or bool",
    ("complex", "band"): "integer or bool",
    ("complex", "min"): "no order",
    ("bool", "avg"): "no average",
    ("bool", "premul"): "scaled",
}
SAME_REASON = {"bor": "band", "bxor": "band", "max": "min"}
IMPOSSIBLE = [(d, op) for d in DTYPES for op in OPS if (d, op) not in CELLS]


def reason(dtype: str, op: str) -> str:
    return REASONS[KIND[dtype], SAME_REASON.get(op, op)]


def test_cells_impossible_are_those_with_a_reason() -> None:
    assert {(KIND[d], SAME_REASON.get(op, op)) for d, op in IMPOSSIBLE} == set(REASONS)
    for dtype in DTYPES:
        for op in OPS:
            assert ((dtype, op) in CELLS) == ((KIND[dtype], SAME_REASON.get(op, op)) not in REASONS)


@each_case("dtype, op", IMPOSSIBLE)
def test_cell_impossible_raises_and_says_why(dtype: str, op: str) -> None:
    assert reason(dtype, op) in _core.why_unsupported(dtype, op)
    operand = np.zeros(16, np.uint8)
    for call in (
        lambda: _core._check_op(dtype, op),
        lambda: _core._reduce_copy([operand, operand], [operand], dtype, op),
    ):
        with pytest.raises(UsageError, match=f"op {op} .*dtype {dtype}: .*{reason(dtype, op)}"):
            call()
    if op == "premul":
        with pytest.raises(UsageError, match=reason(dtype, op)):
            _core._scale(operand, operand, dtype, 2.0)


def test_cell_of_unknown_name_raises() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'f128': expected one of f32, f64"):
        _core.why_unsupported("f128", "sum")
    with pytest.raises(UsageError, match="unknown op 'mean': expected one of sum, prod"):
        _core.why_unsupported("f32", "mean")


@each_case("dtype", [d for d in DTYPES if KIND[d] in ("int", "uint")])
def test_premul_factor_that_an_integer_dtype_lacks_raises(dtype: str) -> None:
    info = np.iinfo(dtype.replace("i", "int") if dtype[0] == "i" else dtype.replace("u", "uint"))
    x = np.zeros(1, info.dtype)
    nan, infinity = float("nan"), float("inf")
    for factor in (0.5, nan, infinity, -infinity, 2.0 * info.max, float(info.min) * 2 - 1):
        with pytest.raises(UsageError, match=f"whole number that {dtype} holds"):
            _core._scale(x, x, dtype, factor)
    _core._scale(x, x, dtype, float(info.min))
    _core._scale(x, x, dtype, float(np.nextafter(float(info.max), 0)) // 1)


def test_premul_is_an_op_name_with_a_factor() -> None:
    import pickle

    op = pycoll.premul(0.5)
    assert op == "premul" and op.factor == 0.5 and repr(op) == "premul(0.5)"
    copy = pickle.loads(pickle.dumps(op))
    assert (copy, copy.factor, type(copy)) == ("premul", 0.5, pycoll.premul)
