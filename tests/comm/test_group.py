"""comm.group: communicators of some of the ranks, in the order of a list."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import on_ranks

from pycoll import UsageError

pytestmark = pytest.mark.ranks


@on_ranks(4)
def test_group_has_the_ranks_in_the_order_of_the_list(comm):
    for ranks in ([2, 0], (1,), range(4), np.array([3, 1, 2])):
        part = comm.group(ranks)
        if comm.rank not in list(ranks):
            assert part is None
            continue
        with part:
            assert part.rank == list(ranks).index(comm.rank)
            assert part.size == len(ranks)
            x = np.array([comm.rank])
            assert part.all_reduce(x)[0] == sum(ranks)
            x[0] = comm.rank
            assert part.broadcast(x, root=len(ranks) - 1)[0] == list(ranks)[-1]


@on_ranks(threads=[2])
def test_group_takes_deterministic_over(comm):
    assert not comm.deterministic
    assert not comm.group([0, 1]).deterministic
    comm.deterministic = True
    assert comm.group([0, 1]).deterministic
    assert comm.split(0).deterministic


@on_ranks(threads=[3])
def test_group_with_other_ranks_on_one_rank_raises_usage_error_there(comm):
    with pytest.raises(UsageError, match="and not on all of them: . of . came"):
        comm.group([0, 1] if comm.rank == 0 else [0, 1, 2])
    comm.barrier()  # which is as usable as before
