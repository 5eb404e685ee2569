"""Plain arrays of large calls run without slots: the kernel copies from process to process."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import Comm, on_ranks

from pycoll.errors import UsageError

pytestmark = pytest.mark.ranks

# Elements of float32 in a block: more than a stage of 128 KiB, and not a multiple of it.
BLOCK = (300 << 10) // 4 + 5


def allowed(comm: Comm) -> bool:
    """Whether processes may read each other's memory here; prints why not."""
    try:
        comm.all_reduce(np.zeros(comm.size * BLOCK, np.float32), algorithm="two_shot/direct")
    except UsageError as error:
        if "cannot all access" not in str(error):
            raise
        print("not tested:", error)
        return False
    return True


@on_ranks(processes=[2, 3, 4])
def test_sums_by_the_kernels_copies_are_right_in_place_and_not(comm):
    """What comes from the first peer lies in the output, unless that is the input."""
    comm.register_after = 0
    if not allowed(comm):
        return
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
