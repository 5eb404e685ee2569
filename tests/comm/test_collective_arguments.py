"""Arguments that a collective refuses before anything is sent, and the messages that say so."""

from __future__ import annotations

import array
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from comm_cases import check_refused
from worlds import Comm, on_ranks

from pycoll import UsageError, _core
from pycoll.launch.local_ranks import local_communicators

pytestmark = pytest.mark.ranks

N = 3  # ranks; the calls are rank 1's, whose peers never call
COLLECTIVES = {row.name: row for row in _core.collectives()}


@pytest.fixture(scope="module")
def comm() -> Comm:
    return local_communicators(N)[1]


def takes(name: str) -> list[str]:
    return list(inspect.signature(getattr(Comm, name)).parameters)


def collectives_with(argument: str) -> list[str]:
    return [name for name in COLLECTIVES if argument in takes(name)]


def root_1(name: str) -> dict[str, int]:
    """scatter needs an array only at its root, unless out gives the shape."""
    return {"root": 1} if "root" in takes(name) else {}


def refused_calls(
    name: str, calls: list[tuple[tuple, dict[str, Any], str]]
) -> dict[str, tuple[Callable[[Comm], Any], str]]:
    """The cases of `check_refused`: a collective with positional and named arguments."""

    def call(args: tuple, options: dict[str, Any], comm: Comm) -> Any:
        return getattr(comm, name)(*args, **options)

    return {
        f"{name} case {i}": (functools.partial(call, args, options), text)
        for i, (args, options, text) in enumerate(calls)
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


def test_every_collective_refuses_arguments_that_it_does_not_take(comm):
    x = np.ones((2 * N, 2))
    for name in COLLECTIVES:
        given = (x,) if "x" in takes(name) else ()
        calls = [
            (given, {"colour": 1}, f"{name} has no argument 'colour'"),
            (given, {"algorithm": 1}, "algorithm is a int, expected a str"),
            ((x,) * 9, {}, f"{name} takes at most .* positional arguments, got 9"),
        ]
        check_refused(refused_calls(name, calls), comm)


def test_every_collective_refuses_what_is_no_usable_array(comm):
    for name in collectives_with("x"):
        root = root_1(name)
        calls = [
            ((), root, f"{name} needs an array x"),
            (([1.0],), root, "x is a list"),
            ((np.ones((N, 4))[:, ::2],), root, "not contiguous.*ascontiguousarray"),
            (
                (np.asfortranarray(np.ones((2 * N, 4))),),
                root,
                "not contiguous.*ascontiguousarray",
            ),
            (
                (np.array([None] * 2 * N),),
                root,
                "dtype object, whose elements are references",
            ),
            ((np.ones(N),), {"x": np.ones(N)}, f"{name} got its argument 'x' twice"),
        ]
        check_refused(refused_calls(name, calls), comm)


def test_every_reduction_refuses_an_unknown_op_and_every_root_must_be_a_rank(comm):
    x = (np.ones(N),)
    for name in collectives_with("op"):
        calls = [
            (x, {"op": "mean"}, "unknown op 'mean': expected one of sum, prod"),
            (x, {"op": 1}, "op is a"),
        ]
        check_refused(refused_calls(name, calls), comm)
    for name in collectives_with("root"):
        text = f"root is .*, expected a rank in 0..{N - 1}"
        calls = [(x, {"root": root}, text) for root in (-1, N, 1 << 80, "0", 1.0)]
        check_refused(refused_calls(name, calls), comm)


def read_only(count: int) -> np.ndarray:
    x = np.ones(count)
    x.flags.writeable = False
    return x


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


def test_every_collective_refuses_an_out_that_does_not_fit_or_overlaps_x(comm):
    memory = np.ones(100)
    for name in collectives_with("out"):
        x = np.ones(2) if name == "neighbor_exchange" else np.ones(N)
        count = {"all_gather": N * N, "gather": N * N, "reduce_scatter": 1, "scatter": 1}.get(
            name, x.size
        )
        outs = [
            (np.ones(count + 1), f"out has {count + 1} elements of f64, expected {count} of f64"),
            (np.ones(count, "f"), f"out has {count} elements of f32, expected {count} of f64"),
            (read_only(count), "out is read-only"),
            ([0.0] * count, "out is a list"),
        ]
        if count > 1:  # one element is always contiguous
            outs.append((np.ones((count, 2))[:, 0], "out is not contiguous"))
        calls = [((x,), {"out": out, **root_1(name)}, text) for out, text in outs]
        for part, out in OVERLAPS[name]:
            calls.append(((memory[part],), {"out": memory[out], **root_1(name)}, "out overlaps x"))
        check_refused(refused_calls(name, calls), comm)


class Unknown:
    """Only DLPack, of a library that NumPy does not understand."""

    dtype = "f64"

    def __dlpack__(self, **options: object) -> object:
        if options:  # as NumPy asks
            raise BufferError("not for NumPy")
        return np.ones(N).__dlpack__()


REFUSED = {
    "c.reduce_scatter(np.ones((7, 3)))": r"reduce_scatter: x has 7 rows .* multiple of the 3 "
    "ranks; or pass counts=",
    "c.reduce_scatter(np.array(1.0))": "first axis: expected an array",
    "c.reduce_scatter(np.ones((7, 3)), counts=[1, 2, 3])": "reduce_scatter: counts add up to "
    "6 rows, x has 7",
    "c.reduce_scatter(np.ones(7), counts=[3, 4])": "counts is .*, expected a sequence of 3 "
    "counts, one for each rank",
    "c.reduce_scatter(np.ones(7), counts=[8, -1, 0])": r"counts\[1\] is -1, expected a number of",
    "c.reduce_scatter(np.ones(7), counts=[3.5, 3.5, 0])": r"counts\[0\] is 3.5",
    "c.reduce_scatter(np.ones(7), counts=[7, 1 << 62, 1 << 62])": r"counts\[1\] is 4611686018427",
    "c.reduce_scatter(np.ones(6), counts=2)": "counts is 2, expected a sequence",
    "c.all_gather(np.ones((4, 2)), counts=[4, 3, 4])": r"all_gather: x has 4 rows .*, counts\[1\], "
    "of this rank, is 3",
    "c.all_gather(np.array(1.0), counts=[1, 1, 1])": "first axis: expected an array",
    "c.all_to_all(np.ones(8))": "all_to_all: x has 8 rows .*; or pass send_counts=",
    "c.all_to_all(np.ones(9), recv_counts=[3, 3, 3])": "recv_counts requires send_counts",
    "c.all_to_all(np.ones(9), send_counts=[3, 3, 2], recv_counts=[3, 3, 3])": "send_counts add up "
    "to 8 rows, x has 9",
    "c.all_to_all(np.ones(9), np.ones(9), [3] * 3, [3, 3, 4])": "out has 9 elements of f64, "
    "expected 10",
    "c.all_to_all(np.ones(3), None, [1] * 3, [1] * 3, algorithm='nothing')": "nothing",
    "c.scatter(np.ones(8), root=1)": "scatter: x has 8 rows .* multiple of the 3 ranks$",
    "c.scatter(None, root=0)": "scatter needs an array: pass out",
    "c.neighbor_exchange(np.ones((3, 4)))": "neighbor_exchange: x has 3 rows .*, expected 2",
    "c.broadcast(read_only(3))": "x is read-only",
    "c.scan(read_only(3))": "x is read-only",
    "c.scan(np.ones(3), 'avg')": "scan has no op avg",
    "c.exscan(np.ones(3), 'avg')": "exscan has no op avg",
    "c.reduce(read_only(3), 1)": "x is read-only",  # in place at the root
    "c.all_reduce(np.ones(3), algorithm='rings')": "no algorithm called 'rings'.*ring",
    "c.all_reduce(np.ones(3), algorithm='ring/udp')": "unknown protocol 'udp'",
    "c.all_reduce(np.ones(0), algorithm='ring/udp')": "unknown protocol 'udp'",
    "c.all_reduce(np.ones(3), 'sum', np.ones(3), 'ring')": "at most 3 positional",
    "c.explain('all_red', 8)": "all_red",
    "c.all_gather(Unknown())": "cannot make a result array like x, a Unknown: pass a result array",
}


def test_collective_with_wrong_arguments_raises_usage_error(comm):
    for expression, text in REFUSED.items():
        with pytest.raises(UsageError, match=text):
            eval(expression, globals(), {"c": comm})
    text = "group: ranks are .*, expected at least one rank of 0..2"
    for ranks in ([], [0, 0], [0, 3], [-1, 0], ["0"], [0.5]):
        with pytest.raises(UsageError, match=text):
            comm.group(ranks)


def test_number_of_ranks_that_is_impossible_is_refused():
    for n in (0, 257):
        with pytest.raises(UsageError, match=f"1 to 256 ranks, asked for {n}"):
            local_communicators(n)


@on_ranks(3)
def test_usage_error_on_one_rank_takes_no_place_in_the_order(comm):
    """The other ranks do not notice: the call was refused before it was counted."""
    mistakes = [
        lambda: comm.all_reduce(np.ones(10)[::2]),
        lambda: comm.all_reduce(read_only(4)),
        lambda: comm.all_reduce([1.0]),
        lambda: comm.all_reduce(np.ones(4), "mean"),
        lambda: comm.all_reduce(np.ones(4), algorithm="unknown"),
        lambda: comm.all_reduce(np.ones(4), algorithm="ring/fast"),
        lambda: comm.all_reduce(np.ones(4), algorithm="ring/fast", async_op=True).wait(),
        lambda: comm.broadcast(np.ones(4), root=comm.size),
        lambda: comm.all_to_all(np.ones(3), None, [1] * 3, [1] * 3, algorithm="nothing"),
    ]
    for i, mistake in enumerate(mistakes):
        if comm.rank == i % comm.size:
            with pytest.raises(UsageError):
                mistake()
        x = array.array("d", [comm.rank + i] * 5)
        assert comm.all_reduce(x).tolist() == [3 + 3 * i] * 5
