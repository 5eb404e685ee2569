"""Plain arrays of large calls run without slots: the kernel copies from process to process."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import Comm

from pycoll import run_ranks
from pycoll.errors import UsageError

pytestmark = pytest.mark.ranks

# Elements of float32 in a block: more than a stage of 128 KiB, and not a multiple of it.
BLOCK = (300 << 10) // 4 + 5


def forbidden(comm: Comm) -> str:
    """Why processes may not read each other's memory here; empty if they may."""
    try:
        comm.all_reduce(np.zeros(comm.size * BLOCK, np.float32), algorithm="two_shot/direct")
    except UsageError as error:
        if "cannot all access" not in str(error):
            raise
        return str(error)
    return ""


def sums(comm: Comm) -> str:
    """Compares sums with NumPy's, unless the system forbids it: the reason."""
    comm.register_after = 0
    if why := forbidden(comm):
        return why
    n, rank = comm.size, comm.rank
    count = n * BLOCK
    values = np.arange(count, dtype=np.float32) % 1009
    mine = slice(rank * BLOCK, (rank + 1) * BLOCK)
    for turn in range(2):
        base = values + turn
        total = n * base + n * (n - 1) / 2
        for algorithm in ("two_shot/direct", "one_shot/direct"):
            x, out = base + rank, np.full(count, -1, np.float32)
            comm.all_reduce(x, "sum", out, algorithm=algorithm)
            np.testing.assert_array_equal(out, total)
            np.testing.assert_array_equal(x, base + rank)
        x = base + rank
        comm.all_reduce(x, algorithm="two_shot/direct")
        np.testing.assert_array_equal(x, total)
        x, out = base + rank, np.full(BLOCK, -1, np.float32)
        comm.reduce_scatter(x.reshape(n, BLOCK), "sum", out, algorithm="all_pairs/direct")
        np.testing.assert_array_equal(out, total[mine])
        np.testing.assert_array_equal(x, base + rank)
        x = (base + rank).reshape(n, BLOCK)
        comm.reduce_scatter(x, "sum", x[rank], algorithm="all_pairs/direct")
        np.testing.assert_array_equal(x[rank], total[mine])
    return ""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_by_the_kernels_copies_are_right_in_place_and_not(size):
    """What comes from the first peer lies in the output, unless that is the input."""
    if why := max(run_ranks(sums, size)):
        pytest.skip(why)
