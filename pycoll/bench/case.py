"""One measured point, and what its ranks bring and must get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.errors import UsageError

NUMPY_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
}  # fmt: skip
OPS = ("sum", "prod", "min", "max", "avg")
_COMBINE = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}
_PERIOD = 61  # a prime: a block in the wrong place does not look right


@dataclass(frozen=True, slots=True)
class Case:
    """A message: which collective, how large, of what, and by whom it is carried out."""

    collective: str
    algorithm: str  # "auto": pycoll chooses
    nbytes: int
    dtype: str
    op: str
    library: str = "pycoll"

    @property
    def series(self) -> str:
        """What the points of one line in a plot have in common."""
        return self.library if self.library != "pycoll" else f"pycoll, {self.algorithm}"


def info(collective: str) -> _core.CollectiveInfo:
    """The collective's row of the core's table.

    Raises:
        UsageError: There is none.
    """
    for row in _core.collectives():
        if row.name == collective:
            return row
    known = ", ".join(row.name for row in _core.collectives())
    raise UsageError(f"no collective is called {collective!r}: expected one of {known}")


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype for one of ours; bf16 comes from ml_dtypes.

    Raises:
        UsageError: Unknown, or ml_dtypes is not installed.
    """
    if name not in NUMPY_DTYPES:
        known = ", ".join(NUMPY_DTYPES)
        raise UsageError(f"bench: expected --dtype to be one of {known}, got {name!r}")
    if name != "bf16":
        return np.dtype(NUMPY_DTYPES[name])
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError("bench: bf16 needs ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Problem:
    """A case among n ranks, as one of them sees it."""

    case: Case
    n: int
    rank: int

    @property
    def block(self) -> int:
        """Elements of one block; at least one."""
        blocks = info(self.case.collective).blocks_per_message(self.n)
        return max(1, self.case.nbytes // (numpy_dtype(self.case.dtype).itemsize * blocks))

    @property
    def nbytes(self) -> int:
        """The size of the message, as nccl-tests counts it."""
        blocks = info(self.case.collective).blocks_per_message(self.n)
        return self.block * blocks * numpy_dtype(self.case.dtype).itemsize

    def brought(self, rank: int) -> np.ndarray:
        """What a rank brings, small integers as float64: shape (blocks, block)."""
        in_parts = self.case.collective in ("reduce_scatter", "all_to_all", "scatter")
        blocks = self.n if in_parts else 2 if self.case.collective == "neighbor_exchange" else 1
        place = np.arange(blocks * self.block, dtype=np.int64) % _PERIOD
        pattern = place * place % _PERIOD
        values = pattern % 2 + 1 if self.case.op == "prod" else pattern % 4 + rank % 3
        return values.reshape(blocks, self.block).astype(np.float64)

    def reduced(self, num_ranks: int) -> np.ndarray:
        """Of the first ranks."""
        result = self.brought(0)
        for rank in range(1, num_ranks):
            result = _COMBINE.get(self.case.op, np.add)(result, self.brought(rank))
        if self.case.op == "avg":
            result = result / self.n
            if np.issubdtype(numpy_dtype(self.case.dtype), np.integer):
                result = np.trunc(result)
        return result

    def expected(self) -> np.ndarray | None:
        """What this rank must get, flat; None where nobody looks."""
        n, rank, name = self.n, self.rank, self.case.collective
        if name in ("gather", "reduce") and rank != 0 or name == "exscan" and rank == 0:
            return None
        if name in ("all_reduce", "reduce"):
            result = self.reduced(n)
        elif name in ("scan", "exscan"):
            result = self.reduced(rank + 1 if name == "scan" else rank)
        elif name == "reduce_scatter":
            result = self.reduced(n)[rank]
        elif name in ("all_gather", "gather"):
            result = np.concatenate([self.brought(r) for r in range(n)])
        elif name == "all_to_all":
            result = np.stack([self.brought(r)[rank] for r in range(n)])
        elif name == "broadcast":
            result = self.brought(0)
        elif name == "scatter":
            result = self.brought(0)[rank]
        elif name == "neighbor_exchange":
            result = np.stack([self.brought((rank - 1) % n)[1], self.brought((rank + 1) % n)[0]])
        else:
            return None
        return result.reshape(-1)

    def num_wrong(self, got: Any) -> int:
        """Elements that are not what they must be."""
        expected = self.expected()
        if expected is None:
            return 0
        dtype = numpy_dtype(self.case.dtype)
        want, have = expected.astype(dtype), np.asarray(got).reshape(-1)
        if self.case.op == "avg" and not np.issubdtype(dtype, np.integer):
            # The quotient is rounded once here and once there, from sums that are exact.
            close = np.isclose(have.astype(np.float64), expected, rtol=2**-7, atol=0)
            return int(np.count_nonzero(~close))
        return int(np.count_nonzero(want != have))
