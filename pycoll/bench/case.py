"""One measured case: its inputs by rank, and the result that each rank must get. NumPy alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycoll.bench.arithmetic import DTYPES, EXACT, ITEMSIZE, KIND, OPS, narrow, oracle
from pycoll.bench.oracle import BARRIER, COLLECTIVES, Collective

PERIOD = 61  # a prime: a shifted block does not look right

Message = tuple[str, str, str, int, int, str, bool]


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """A message, and the library that carries it.

    Attributes:
        collective, dtype, op: Their names; op is "none" where the collective takes none.
        num_ranks: Number of ranks.
        nbytes: Bytes of the larger one of input and output, as nccl-tests counts them.
        in_place: Whether the output lies in the input.
        library: Its name.
        algorithm: "auto": the library chooses.
        where: Hosts and links, when the ranks are on several hosts.
        rewritten: Whether the input is written before each timed call, as programs do.
    """

    collective: str
    dtype: str
    num_ranks: int
    nbytes: int
    op: str = "sum"
    in_place: bool = False
    library: str = "pycoll"
    algorithm: str = "auto"
    where: str = ""
    rewritten: bool = False

    @staticmethod
    def of_size(collective: str, dtype: str, n: int, nbytes: int, **more: Any) -> Case:
        """The case of about so many bytes: whole elements, and at least one in each block.

        Raises:
            ValueError: No such collective, dtype or op.
        """
        if collective not in (*COLLECTIVES, "barrier"):
            known = ", ".join((*COLLECTIVES, "barrier"))
            raise ValueError(f"no collective is called {collective!r}: expected one of {known}")
        for what, name, names in (("dtype", dtype, DTYPES), ("op", more.get("op", "sum"), OPS)):
            if name not in (*names, "none"):
                raise ValueError(f"expected --{what} to be one of {', '.join(names)}, got {name!r}")
        row = COLLECTIVES.get(collective, BARRIER)
        more["op"] = more.get("op", "sum") if row.has_op else "none"
        unit = ITEMSIZE[dtype] * row.blocks_per_payload(n)
        return Case(collective, dtype, n, max(1, nbytes // unit) * unit, **more)

    def of_library(self, library: str) -> Case:
        """This message by another library."""
        return replace(self, library=library)

    @property
    def row(self) -> Collective:
        return COLLECTIVES.get(self.collective, BARRIER)

    @property
    def series(self) -> str:
        """The name of this line in a plot against size."""
        return f"pycoll, {self.algorithm}" if self.library == "pycoll" else self.library

    @property
    def message(self) -> Message:
        """Equal for the cases that are compared with each other."""
        what = self.collective, self.dtype, self.op, self.num_ranks, self.nbytes
        return *what, self.where, self.rewritten

    @property
    def block(self) -> int:
        """Elements of a block."""
        blocks = self.row.blocks_per_payload(self.num_ranks)
        return self.nbytes // (ITEMSIZE[self.dtype] * blocks)

    @property
    def num_in(self) -> int:
        """Elements of a rank's input."""
        return self.row.in_blocks(self.num_ranks) * self.block

    @property
    def num_out(self) -> int:
        """Elements of a rank's output."""
        return self.row.out_blocks(self.num_ranks) * self.block

    def algbw(self, time_s: float) -> float:
        """Bytes per second."""
        return self.nbytes / time_s

    def busbw(self, time_s: float) -> float:
        """Bytes per second over a link, as nccl-tests defines it."""
        return self.algbw(time_s) * self.row.busbw_factor(self.num_ranks)

    @functools.lru_cache(4096)  # noqa: B019  frozen, small, and of use as long as the process
    def _period(self, rank: int, block: int) -> np.ndarray:
        """The elements that a block of a rank's input repeats, in the storage type.

        They are whole numbers so small that every sum is exact in the dtype, in any order.
        """
        exact = EXACT.get(self.dtype, math.inf)
        if KIND[self.dtype] == "bool":
            low, high = 0, 2
        elif self.op == "prod":
            low, high = 1, 3 if rank < 4 else 2
        elif 3 * self.num_ranks > exact:
            low, high = 0, 2 if rank < exact else 1
        else:
            low, high = 0, 4
        values = np.random.default_rng([rank, block]).integers(low, high, PERIOD)
        return narrow(values.astype(np.float64), self.dtype)

    def inputs(self, rank: int) -> np.ndarray:
        """A rank's input, flat, in the storage type."""
        blocks = range(self.row.in_blocks(self.num_ranks))
        return np.concatenate([np.resize(self._period(rank, b), self.block) for b in blocks])

    def expected(self, rank: int) -> np.ndarray | None:
        """A rank's result with root 0, in the storage type; None: it has none."""
        parts = self.row.parts(self.num_ranks, rank, 0)
        if parts is None:
            return None
        blocks = []
        for sources, block in parts:
            periods = [self._period(source, block) for source in sources]
            if self.row.has_op:
                divisor = len(periods) if self.op == "avg" else 1
                periods = [oracle(periods, self.dtype, self.op, divisor)]
            blocks.append(np.resize(periods[0], self.block))
        return np.concatenate(blocks)

    def wrong_elements(self, rank: int, got: Any) -> np.ndarray:
        """Places of the elements of a result, given in the storage type, that are not exact."""
        want = self.expected(rank)
        return np.flatnonzero([] if want is None else np.asarray(got).reshape(-1) != want)

    def why_wrong(self, rank: int, got: Any) -> str | None:
        """The error of a result in words; None: it is exact."""
        wrong, want = self.wrong_elements(rank, got), self.expected(rank)
        if wrong.size == 0 or want is None:
            return None
        first = int(wrong[0])
        return (
            f"{wrong.size} of {want.size} elements wrong, "
            f"the first at {first}: expected {want[first]}, got {np.ravel(got)[first]}"
        )
