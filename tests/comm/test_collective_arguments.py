"""What each collective refuses before anything is sent, and how it says so."""

from __future__ import annotations

import array
import inspect
from collections.abc import Callable

import numpy as np
import pytest

import pycoll
from pycoll import UsageError, _core, run_ranks
from pycoll.launch.local_ranks import local_communicators

pytestmark = pytest.mark.ranks

N = 3  # ranks; the calls are rank 1's, whose peers never come
COLLECTIVES = {row.name: row for row in _core.collectives()}
Comm = pycoll.Communicator


@pytest.fixture(scope="module")
def comm() -> Comm:
    return local_communicators(N)[1]


def takes(name: str) -> list[str]:
    return list(inspect.signature(getattr(Comm, name)).parameters)


with_argument = {
    argument: [name for name in COLLECTIVES if argument in takes(name)]
    for argument in ("x", "op", "root", "out", "counts", "algorithm", "async_op", "deterministic")
}


def test_collectives_signatures_follow_the_table() -> None:
    for name, row in COLLECTIVES.items():
        assert ("op" in takes(name)) == row.has_op == ("deterministic" in takes(name)), name
        assert ("root" in takes(name)) == row.has_root, name
        assert {"algorithm", "async_op"} <= set(takes(name)), name
        doc = inspect.getdoc(getattr(Comm, name))
        for section in ("Returns:", "Raises:", "Cost:", "Source:"):
            assert section in doc, (name, section)
        for argument in takes(name)[1:]:
            assert f"    {argument}: " in doc, (name, argument)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_arguments_that_it_does_not_take_raise_usage_error(comm, name):
    call = getattr(comm, name)
    x = np.ones((2 * N, 2))
    given = [x] if "x" in takes(name) else []
    with pytest.raises(UsageError, match=f"{name} has no argument 'colour'"):
        call(*given, colour=1)
    with pytest.raises(UsageError, match="algorithm is a int, expected a str"):
        call(*given, algorithm=1)
    with pytest.raises(UsageError, match=f"{name} takes at most .* positional arguments, got 9"):
        call(*[x] * 9)


@pytest.mark.parametrize("name", with_argument["x"])
def test_collective_without_an_array_raises_usage_error(comm, name):
    # scatter needs one at its root only, where it is not told by out what to expect.
    root = {"root": 1} if "root" in takes(name) else {}
    with pytest.raises(UsageError, match=f"{name} needs an array x"):
        getattr(comm, name)(**root)
    for x, text in [
        ([1.0], "x is a list"),
        (np.ones((N, 4))[:, ::2], "not contiguous.*ascontiguousarray"),
        (np.asfortranarray(np.ones((2 * N, 4))), "not contiguous.*ascontiguousarray"),
        (np.array([None] * 2 * N), "dtype object, whose elements are references"),
    ]:
        with pytest.raises(UsageError, match=text):
            getattr(comm, name)(x, **root)
    with pytest.raises(UsageError, match=f"{name} got its argument 'x' twice"):
        getattr(comm, name)(np.ones(N), x=np.ones(N))


@pytest.mark.parametrize("name", with_argument["op"])
def test_collective_with_an_unknown_op_raises_usage_error(comm, name):
    with pytest.raises(UsageError, match="unknown op 'mean': expected one of sum, prod"):
        getattr(comm, name)(np.ones(N), op="mean")
    with pytest.raises(UsageError, match="op is a"):
        getattr(comm, name)(np.ones(N), op=1)


@pytest.mark.parametrize("name", with_argument["root"])
def test_collective_with_a_root_that_is_no_rank_raises_usage_error(comm, name):
    for root in (-1, N, 1 << 80, "0", 1.0):
        with pytest.raises(UsageError, match=f"root is .*, expected a rank in 0..{N - 1}"):
            getattr(comm, name)(np.ones(N), root=root)


def read_only(count: int) -> np.ndarray:
    x = np.ones(count)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", with_argument["out"])
def test_collective_with_an_out_that_does_not_fit_raises_usage_error(comm, name):
    root = {"root": 1} if "root" in takes(name) else {}
    x = np.ones(2) if name == "neighbor_exchange" else np.ones(N)
    count = {"all_gather": N * N, "gather": N * N, "reduce_scatter": 1, "scatter": 1}.get(
        name, x.size
    )
    for out, text in [
        (np.ones(count + 1), f"out has {count + 1} elements of f64, expected {count} of f64"),
        (np.ones(count, np.float32), f"out has {count} elements of f32, expected {count} of f64"),
        (read_only(count), "out is read-only"),
        (np.ones((count, 2))[:, 0], "out is not contiguous"),
        ([0.0] * count, "out is a list"),
    ]:
        if out is not None and getattr(out, "size", 0) == 1 and "not contig" in text:
            continue  # one element is always contiguous
        with pytest.raises(UsageError, match=text):
            getattr(comm, name)(x, out=out, **root)


# Views of one buffer of 100 elements for x and out: which overlap, and are refused.
OVERLAPS: dict[str, list[tuple[slice, slice]]] = {
    "all_reduce": [(slice(0, 9), slice(1, 10)), (slice(1, 10), slice(0, 9))],
    "scan": [(slice(0, 9), slice(1, 10))],
    "exscan": [(slice(0, 9), slice(8, 17))],
    "reduce": [(slice(0, 9), slice(8, 17))],
    # Rank 1's block of 9 is 3..6: everything else overlaps in part, or is another rank's.
    "reduce_scatter": [(slice(0, 9), slice(s, s + 3)) for s in (0, 1, 2, 4, 6, 8)],
    "all_gather": [(slice(s, s + 3), slice(0, 9)) for s in (0, 1, 2, 4, 6, 8)],
    "gather": [(slice(3, 6), slice(0, 9)), (slice(8, 11), slice(0, 9))],
    "scatter": [(slice(0, 9), slice(3, 6)), (slice(0, 9), slice(8, 11))],
    "all_to_all": [(slice(0, 9), slice(0, 9)), (slice(0, 9), slice(8, 17))],
    "neighbor_exchange": [(slice(0, 2), slice(0, 2)), (slice(0, 2), slice(1, 3))],
}


@pytest.mark.parametrize("name", with_argument["out"])
def test_collective_with_an_out_that_overlaps_x_raises_usage_error(comm, name):
    root = {"root": 1} if "root" in takes(name) else {}
    memory = np.ones(100)
    for x, out in OVERLAPS[name]:
        with pytest.raises(UsageError, match="out overlaps x"):
            getattr(comm, name)(memory[x], out=memory[out], **root)


REFUSED: dict[str, tuple[Callable[[Comm], object], str]] = {
    "reduce_scatter_indivisible": (
        lambda c: c.reduce_scatter(np.ones((7, 3))),
        r"reduce_scatter: x has 7 rows .* multiple of the 3 ranks; or pass counts=",
    ),
    "reduce_scatter_no_axis": (lambda c: c.reduce_scatter(np.array(1.0)), "first axis: expected an array"),
    "reduce_scatter_counts_sum": (
        lambda c: c.reduce_scatter(np.ones((7, 3)), counts=[1, 2, 3]),
        "reduce_scatter: counts add up to 6 rows, x has 7",
    ),
    "reduce_scatter_few_counts": (
        lambda c: c.reduce_scatter(np.ones(7), counts=[3, 4]),
        "counts is .*, expected a sequence of 3 counts, one for each rank",
    ),
    "reduce_scatter_negative_count": (
        lambda c: c.reduce_scatter(np.ones(7), counts=[8, -1, 0]),
        r"counts\[1\] is -1, expected a number of rows",
    ),
    "reduce_scatter_count_is_no_number": (
        lambda c: c.reduce_scatter(np.ones(7), counts=[3.5, 3.5, 0]),
        r"counts\[0\] is 3.5",
    ),
    "reduce_scatter_huge_count": (
        lambda c: c.reduce_scatter(np.ones(7), counts=[7, 1 << 62, 1 << 62]),
        r"counts\[1\] is 4611686018427387904",
    ),
    "reduce_scatter_counts_is_a_number": (
        lambda c: c.reduce_scatter(np.ones(6), counts=2),
        "counts is 2, expected a sequence",
    ),
    "all_gather_other_count": (
        lambda c: c.all_gather(np.ones((4, 2)), counts=[4, 3, 4]),
        r"all_gather: x has 4 rows .*, counts\[1\], of this rank, is 3",
    ),
    "all_gather_counts_no_axis": (
        lambda c: c.all_gather(np.array(1.0), counts=[1, 1, 1]),
        "first axis: expected an array",
    ),
    "all_to_all_indivisible": (
        lambda c: c.all_to_all(np.ones(8)),
        "all_to_all: x has 8 rows .*; or pass send_counts=",
    ),
    "all_to_all_only_recv_counts": (
        lambda c: c.all_to_all(np.ones(9), recv_counts=[3, 3, 3]),
        "recv_counts requires send_counts",
    ),
    "all_to_all_send_counts_sum": (
        lambda c: c.all_to_all(np.ones(9), send_counts=[3, 3, 2], recv_counts=[3, 3, 3]),
        "send_counts add up to 8 rows, x has 9",
    ),
    "all_to_all_recv_counts_out": (
        lambda c: c.all_to_all(np.ones(9), np.ones(9), [3, 3, 3], [3, 3, 4]),
        "out has 9 elements of f64, expected 10",
    ),
    "scatter_indivisible": (
        lambda c: c.scatter(np.ones(8), root=1),
        "scatter: x has 8 rows .* multiple of the 3 ranks$",
    ),
    "scatter_nothing_to_go_by": (
        lambda c: c.scatter(None, root=0),
        "scatter needs an array: pass out",
    ),
    "neighbor_exchange_three_rows": (
        lambda c: c.neighbor_exchange(np.ones((3, 4))),
        "neighbor_exchange: x has 3 rows .*, expected 2",
    ),
    "broadcast_read_only": (lambda c: c.broadcast(read_only(3)), "x is read-only"),
    "scan_read_only_in_place": (lambda c: c.scan(read_only(3)), "x is read-only"),
    "scan_avg": (lambda c: c.scan(np.ones(3), "avg"), "scan has no op avg"),
    "exscan_avg": (lambda c: c.exscan(np.ones(3), "avg"), "exscan has no op avg"),
    "reduce_read_only_in_place_at_root": (lambda c: c.reduce(read_only(3), 1), "x is read-only"),
    "unknown_algorithm": (lambda c: c.all_gather(np.ones(3), algorithm="best"), "best"),
    "unknown_protocol": (lambda c: c.all_reduce(np.ones(3), algorithm="ring/udp"), "udp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_collective_with_wrong_arguments_raises_usage_error(comm, case):
    call, text = REFUSED[case]
    with pytest.raises(UsageError, match=text):
        call(comm)


class Unknown:
    """Only DLPack, of a library that NumPy does not understand."""

    dtype = "f64"

    def __dlpack__(self, **options: object) -> object:
        if options:  # as NumPy asks
            raise BufferError("not for everybody")
        return np.ones(N).__dlpack__()


def test_collective_that_cannot_make_its_result_asks_for_out(comm):
    with pytest.raises(UsageError, match="cannot make a result array like x, a Unknown: pass one"):
        comm.all_gather(Unknown())


def test_collective_leaves_the_communicator_usable_after_a_usage_error():
    def work(comm: Comm) -> None:
        for case in range(20):
            with pytest.raises(UsageError):
                comm.all_reduce([case])
            x = array.array("d", [1.0])
            assert comm.all_reduce(x)[0] == comm.size

    run_ranks(work, 2, threads=True)


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 3], [-1, 0], ["0"], [0.5]])
def test_group_of_ranks_that_are_not_there_raises_usage_error(comm, ranks):
    with pytest.raises(UsageError, match="group: ranks are .*, expected at least one rank of 0..2"):
        comm.group(ranks)
