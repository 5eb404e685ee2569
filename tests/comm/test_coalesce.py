"""coalesce: groups of operations run at their end, as if one after another."""

from __future__ import annotations

import numpy as np
import pytest
from comm_cases import inputs
from worlds import on_ranks

from pycoll import CollectiveMismatchError, UsageError

pytestmark = pytest.mark.ranks


@on_ranks(2, processes=[3], threads=[1, 8])
def test_coalesce_of_all_reduces_gives_the_bits_of_single_ones(comm):
    counts = [1, 7, 0, 300, 20_000, 5, 2000, 2000, 2000, 100_000, 3]
    for dtype in (np.float32, np.int32):
        xs = [inputs(comm.size, count, dtype, seed=count)[comm.rank] for count in counts]
        singles = [comm.all_reduce(x, "sum", out=np.empty_like(x)) for x in xs]
        outs = [np.full_like(x, 77) for x in xs]
        before = [x.copy() for x in xs]
        with comm.coalesce():
            for x, out in zip(xs, outs, strict=True):
                assert comm.all_reduce(x, "sum", out=out) is out
                assert (out == 77).all()  # nothing has run yet
        for out, single in zip(outs, singles, strict=True):
            np.testing.assert_array_equal(out.view(np.uint8), single.view(np.uint8))
        for x, kept in zip(xs, before, strict=True):
            np.testing.assert_array_equal(x, kept)


@on_ranks(4)
def test_coalesce_packs_small_all_reduces_into_one(comm):
    xs = [np.ones(10, np.int64) for _ in range(20)]
    before = comm.ledger["sent_messages"]
    comm.all_reduce(np.ones(200, np.int64))
    one = comm.ledger["sent_messages"] - before
    with comm.coalesce():
        for x in xs:
            comm.all_reduce(x)
    assert comm.ledger["sent_messages"] - before == 2 * one
    assert all((x == comm.size).all() for x in xs)


@on_ranks(2)
def test_coalesce_keeps_the_order_where_one_reads_what_another_writes(comm):
    x, y = np.ones(4), np.zeros(4)
    with comm.coalesce():
        comm.all_reduce(x)
        comm.all_reduce(x)
        comm.all_reduce(x, out=y)
        comm.all_reduce(x, "max")
    assert (x == 4).all()
    assert (y == 8).all()


@on_ranks(2, processes=[5], threads=[3], parts=[3])
def test_coalesce_of_sends_before_receives_does_not_deadlock(comm):
    n = comm.size
    for nbytes in (8, 100_000):
        for with_collectives in (False, True):
            for turn in range(2):
                got = [np.zeros(nbytes, np.uint8) for _ in range(n)]
                total = np.ones(5)
                with comm.coalesce():
                    for peer in range(n):
                        comm.send(np.full(nbytes, comm.rank, np.uint8), peer, turn)
                    if with_collectives:
                        comm.all_reduce(total)
                        comm.barrier()
                    for peer in range(n):
                        assert comm.recv(got[peer], peer, turn) is got[peer]
                for peer in range(n):
                    assert (got[peer] == peer).all()
                if with_collectives:
                    assert (total == n).all()


@on_ranks(2)
def test_coalesce_that_raises_sends_nothing(comm):
    x = np.ones(3)
    with pytest.raises(ZeroDivisionError), comm.coalesce():
        if comm.rank == 0:
            comm.all_reduce(x)
            comm.send(x, 1)
        1 / 0  # noqa: B018
    with pytest.raises(UsageError, match="async_op within coalesce"), comm.coalesce():
        comm.all_reduce(x, async_op=True)
    with pytest.raises(UsageError, match="async_op within coalesce"), comm.coalesce():
        comm.recv(x, 0, async_op=True)
    with pytest.raises(UsageError, match="recv_any within coalesce"), comm.coalesce():
        comm.recv_any(x)
    with comm.coalesce():
        pass
    assert comm.all_reduce(x)[0] == comm.size


@on_ranks(2)
def test_coalesce_within_another_joins_it(comm):
    x, y = np.ones(3), np.ones(4)
    with comm.coalesce():
        comm.all_reduce(x)
        with comm.coalesce():
            comm.all_reduce(y)
        assert (y == 1).all()
    assert (x == comm.size).all()
    assert (y == comm.size).all()


@on_ranks(2)
def test_coalesce_of_groups_that_differ_raises_mismatch(comm):
    for other in ([8], [5, 3], [3, 4, 1]):
        part = comm.split(0)
        with pytest.raises(CollectiveMismatchError), part.coalesce():
            for count in [3, 5] if comm.rank == 0 else other:
                part.all_reduce(np.ones(count))
