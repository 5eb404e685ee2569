"""The oracle of reductions, under the name that the tests import it by."""

from __future__ import annotations

from pycoll.bench.arithmetic import (
    CELLS,
    DTYPES,
    FLOATS,
    KIND,
    OPS,
    STORAGE,
    Array,
    narrow,
    oracle,
    random_values,
    scaled,
    widen,
)

__all__ = [
    "CELLS", "DTYPES", "FLOATS", "KIND", "OPS", "STORAGE", "Array", "narrow", "oracle",
    "random_values", "scaled", "widen",
]  # fmt: skip
