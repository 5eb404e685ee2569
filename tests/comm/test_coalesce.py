"""coalesce: groups of operations run at their end, as if one after another."""

from __future__ import annotations

import numpy as np
import pytest
from comm_cases import both, inputs

import pycoll
from pycoll import CollectiveMismatchError, UsageError, run_ranks

pytestmark = pytest.mark.ranks


@both
@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_coalesce_all_reduces_give_the_bits_of_single_ones(n, dtype, threads):
    counts = [1, 7, 0, 300, 20_000, 5, 2000, 2000, 2000, 100_000, 3]

    def work(comm: pycoll.Communicator) -> None:
        xs = [inputs(n, count, dtype, seed=count)[comm.rank] for count in counts]
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

    run_ranks(work, n, threads=threads, timeout_s=20)


@both
def test_coalesce_packs_small_all_reduces_into_one(threads):
    def work(comm: pycoll.Communicator) -> int:
        xs = [np.ones(10, np.int64) for _ in range(20)]
        before = comm.ledger["sent_messages"]
        comm.all_reduce(np.ones(200, np.int64))
        one = comm.ledger["sent_messages"] - before
        with comm.coalesce():
            for x in xs:
                comm.all_reduce(x)
        assert comm.ledger["sent_messages"] - before == 2 * one
        assert all((x == comm.size).all() for x in xs)

    run_ranks(work, 4, threads=threads)


@both
def test_coalesce_keeps_the_order_where_one_reads_what_another_writes(threads):
    def work(comm: pycoll.Communicator) -> None:
        x, y = np.ones(4), np.zeros(4)
        with comm.coalesce():
            comm.all_reduce(x)
            comm.all_reduce(x)
            comm.all_reduce(x, out=y)
            comm.all_reduce(x, "max")
        assert (x == 4).all()
        assert (y == 8).all()

    run_ranks(work, 2, threads=threads)


@both
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("nbytes", [8, 100_000])
@pytest.mark.parametrize("with_collectives", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("way", ["direct", "parts"])
def test_coalesce_sends_before_receives_do_not_deadlock(
    n, nbytes, with_collectives, way, threads, monkeypatch
):
    if way == "parts":
        monkeypatch.setenv("PYCOLL_PEER_MEMORY", "0")

    def work(comm: pycoll.Communicator) -> None:
        for round_idx in range(3):
            got = [np.zeros(nbytes, np.uint8) for _ in range(n)]
            total = np.ones(5)
            with comm.coalesce():
                for peer in range(n):
                    comm.send(np.full(nbytes, comm.rank, np.uint8), peer, round_idx)
                if with_collectives:
                    comm.all_reduce(total)
                    comm.barrier()
                for peer in range(n):
                    assert comm.recv(got[peer], peer, round_idx) is got[peer]
            for peer in range(n):
                assert (got[peer] == peer).all()
            if with_collectives:
                assert (total == n).all()

    run_ranks(work, n, threads=threads, timeout_s=20)


@both
def test_coalesce_error_within_sends_nothing(threads):
    def work(comm: pycoll.Communicator) -> None:
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

    run_ranks(work, 2, threads=threads)


@both
def test_coalesce_within_another_joins_it(threads):
    def work(comm: pycoll.Communicator) -> None:
        x, y = np.ones(3), np.ones(4)
        with comm.coalesce():
            comm.all_reduce(x)
            with comm.coalesce():
                comm.all_reduce(y)
            assert (y == 1).all()
        assert (x == comm.size).all()
        assert (y == comm.size).all()

    run_ranks(work, 2, threads=threads)


@both
@pytest.mark.parametrize("other", [[8], [5, 3], [3, 4, 1]], ids=str)
def test_coalesce_groups_that_differ_raise_mismatch(other, threads):
    def work(comm: pycoll.Communicator) -> None:
        counts = [3, 5] if comm.rank == 0 else other
        with pytest.raises(CollectiveMismatchError), comm.coalesce():
            for count in counts:
                comm.all_reduce(np.ones(count))

    run_ranks(work, 2, threads=threads, timeout_s=10)
