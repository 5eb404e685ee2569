"""What a worker leaves out of its messages: filters of keys, of gradients, and of bits.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI,
    and "Communication Efficient Distributed Machine Learning with the Parameter Server", NeurIPS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.ps.keys import Table
from pycoll.parallel.replicas.compression import Compressor, Int8

KEY_LISTS = 32  # lists of keys that a server remembers for each worker and table


class Codec(Protocol):
    """How values are written in a message."""

    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        """Bytes of `size` values."""

    def encode(self, values: Tensor) -> Tensor:
        """[size] values as uint8."""

    def decode(self, body: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """The [size] values that `encode` wrote."""


class Raw:
    """Values as they are."""

    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        """See Codec."""
        return size * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """See Codec."""
        return values.contiguous().view(torch.uint8)

    def decode(self, body: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        return body.view(dtype)


@dataclass(frozen=True, slots=True)
class Compressed:
    """Values as a compressor of replicas writes them."""

    compressor: Compressor

    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        """See Codec."""
        return self.compressor.nbytes(size)

    def encode(self, values: Tensor) -> Tensor:
        """See Codec."""
        return self.compressor.encode(values)

    def decode(self, body: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        return self.compressor.decode(body, torch.empty(size, dtype=dtype))


# By number in the header of a message.
CODECS: tuple[Codec, ...] = (Raw(), Compressed(Int8()))


class Filter:
    """Leaves something out of pushes; each method leaves out nothing unless a filter overrides it.

    Attributes:
        caches_keys: Servers remember lists of keys, of which a digest is sent.
        codec: Number of the codec of gradients.
    """

    caches_keys = False
    codec = 0

    def select(
        self, table: Table, rows: Tensor, gradients: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The rows whose gradients are sent, and what is sent for them.

        Args:
            table: The table.
            rows: Rows, ascending, [n] int64.
            gradients: [n, dim].
            values: Returns the weights of rows that the worker has pulled last, [n, dim].
        """
        return rows, gradients

    def sent(self, table: Table, rows: Tensor, wanted: Tensor, written: Tensor) -> None:
        """Hears what a codec has made of the gradients, [n, dim] each."""


class KeyCache(Filter):
    """Sends 8 bytes in place of a list of keys that the server has had before."""

    caches_keys = True


class Residuals:
    """What was not sent, by row; memory for a whole table, of which touched pages are used."""

    def __init__(self) -> None:
        self._of_table: dict[int, Tensor] = {}

    def of(self, table: Table) -> Tensor:
        """[rows, dim] of the table's dtype."""
        if table.number not in self._of_table:
            self._of_table[table.number] = torch.zeros(table.rows, table.dim, dtype=table.dtype)
        return self._of_table[table.number]


class Significance(Filter):
    """Keeps gradients back, and adds them up, until a row's sum has an element over a threshold.

    Args:
        threshold: Magnitude of the sum from which a row is sent.
    """

    def __init__(self, threshold: float) -> None:
        if not threshold >= 0:
            raise UsageError(f"Significance: threshold={threshold}, expected 0 or more")
        self.threshold = threshold
        self._kept = Residuals()

    def select(
        self, table: Table, rows: Tensor, gradients: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See Filter."""
        kept = self._kept.of(table)
        sums = kept[rows] + gradients
        goes = sums.abs().amax(1) > self.threshold
        kept[rows] = torch.where(goes[:, None], 0, sums)
        return rows[goes], sums[goes]


class KKT(Filter):
    """Leaves out gradients that an l1 penalty would undo: weights of 0 that will stay 0.

    For the optimizer `Proximal`. A row goes if one of its elements has a weight other than 0 or a
    gradient of at least `l1 - slack`.

    Args:
        l1: Weight of the penalty.
        slack: Margin for gradients of other workers and later ones, from 0 to `l1`.
    """

    def __init__(self, l1: float, slack: float = 0.0) -> None:
        if not 0 <= slack <= l1:
            raise UsageError(f"KKT: l1={l1}, slack={slack}, expected 0 <= slack <= l1")
        self._limit = l1 - slack

    def select(
        self, table: Table, rows: Tensor, gradients: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See Filter."""
        goes = ((values(rows) != 0) | (gradients.abs() >= self._limit)).any(1)
        return rows[goes], gradients[goes]


class Int8Feedback(Filter):
    """Rounds gradients to int8, 1.016 bytes for each; what rounding loses is added later."""

    codec = 1

    def __init__(self) -> None:
        self._lost = Residuals()

    def select(
        self, table: Table, rows: Tensor, gradients: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See Filter."""
        return rows, gradients + self._lost.of(table)[rows]

    def sent(self, table: Table, rows: Tensor, wanted: Tensor, written: Tensor) -> None:
        """See Filter."""
        missing = wanted - written
        self._lost.of(table)[rows] = torch.where(missing.isfinite(), missing, 0)


__all__ = [
    "CODECS",
    "KEY_LISTS",
    "KKT",
    "Codec",
    "Filter",
    "Int8Feedback",
    "KeyCache",
    "Raw",
    "Significance",
]
