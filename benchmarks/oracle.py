"""What each collective is given and what must come out, for every rank; it needs NumPy alone.

A size is that of nccl-tests: the bytes of the larger one of what a rank brings and what it gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# By name: bytes of an element, and the type that holds its bits in NumPy (which has no bf16).
DTYPES = {"f32": (4, np.float32), "bf16": (2, np.uint16)}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
IN_PARTS = ("reduce_scatter", "all_to_all")  # Their input is one block for each rank.
OUT_PARTS = ("all_gather", "all_to_all")  # Their output is one block from each rank.
PATTERN_PERIOD = 61  # A prime, so that a chunk in the wrong place cannot look right.


@dataclass(frozen=True, slots=True)
class Message:
    """One collective among n ranks at one size."""

    collective: str
    dtype: str
    n: int
    nbytes: int

    @property
    def count(self) -> int:
        """Elements of the larger one of input and output."""
        return self.nbytes // DTYPES[self.dtype][0]

    @property
    def num_in(self) -> int:
        """Elements that a rank brings."""
        return self.count // self.n if self.collective == "all_gather" else self.count

    @property
    def num_out(self) -> int:
        """Elements that a rank gets."""
        return self.count // self.n if self.collective == "reduce_scatter" else self.count

    def pattern(self, first: int, count: int) -> np.ndarray:
        """Elements first.. of what all ranks' values have in common: 0 to 3."""
        place = np.arange(first, first + count) % PATTERN_PERIOD
        return (place * place % PATTERN_PERIOD % 4).astype(np.float32)

    def values(self, rank: int) -> np.ndarray:
        """What a rank brings. Sums of up to 8 ranks are below 256: exact in bf16, in any order."""
        first = rank * self.num_in if self.collective == "all_gather" else 0
        return self.pattern(first, self.num_in) + np.float32(4 * (rank % 8))

    def expected(self, rank: int) -> np.ndarray:
        """What it must get."""
        first = 0 if self.num_out == self.count else rank * self.num_out
        if self.collective in ("all_reduce", "reduce_scatter"):
            ranks = np.float32(sum(4 * (r % 8) for r in range(self.n)))
            return self.n * self.pattern(first, self.num_out) + ranks
        if self.collective == "broadcast":
            return self.pattern(0, self.count)  # The root is rank 0.
        block = self.count // self.n
        blocks = []
        for source in range(self.n):
            first = (source if self.collective == "all_gather" else rank) * block
            blocks.append(self.pattern(first, block) + np.float32(4 * (source % 8)))
        return np.concatenate(blocks)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Small integers as the bits of a dtype."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values


def wrong_elements(output: Any, message: Message, rank: int) -> str | None:
    """Says what is wrong in what a rank got, or None."""
    want = encode(message.expected(rank), message.dtype)
    wrong = np.flatnonzero(output != want)
    if wrong.size == 0:
        return None
    first = int(wrong[0])
    return (
        f"{wrong.size} of {want.size} elements wrong, "
        f"the first at {first}: expected {want[first]}, got {output[first]}"
    )
