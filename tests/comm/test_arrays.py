"""Arrays that a call takes: anything contiguous in CPU memory, without a copy."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from comm_cases import check_refused
from worlds import Comm, on_ranks

import pycoll
from pycoll import UsageError
from pycoll.launch.local_ranks import local_communicators

pytestmark = pytest.mark.ranks


class OnlyDlpack:
    """An array whose only way in is DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.dtype = array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@on_ranks(2)
def test_all_reduce_in_place_returns_the_very_array_of_any_shape(comm):
    x = np.full((2, 3), comm.rank + 1.0)
    assert comm.all_reduce(x) is x
    np.testing.assert_array_equal(x, np.full((2, 3), 3.0))
    assert comm.all_reduce(x, out=x) is x and (x == 6).all()
    x = np.array(comm.rank + 1.0)
    comm.all_reduce(x)
    assert x.shape == () and float(x) == 3
    x = np.ones((1, 2, 1, 3, 1, 2, 1, 5))
    comm.all_reduce(x)
    assert (x == 2).all()
    comm.all_reduce(np.ones((3, 0, 2)))


@on_ranks(2)
def test_all_reduce_out_gets_the_result_and_x_stays(comm):
    for count in (1, 100, 70_000):
        x = np.full(count, comm.rank + 1.0)
        x.flags.writeable = False  # only read
        out = np.zeros(count)
        assert comm.all_reduce(x, "sum", out) is out
        assert comm.all_reduce(x, op="sum", out=out) is out
        assert (out == 3).all()
        assert (x == comm.rank + 1).all()
    halves = np.full(10, 2.0)
    comm.all_reduce(halves[:5], out=halves[5:])
    assert halves.tolist() == [2] * 5 + [4] * 5
    out = array.array("d", [0.0] * 6)  # another library's, of another shape
    assert comm.all_reduce(np.full((2, 3), 2.0), out=out) is out
    assert out.tolist() == [4.0] * 6


@on_ranks(2)
def test_all_reduce_takes_arrays_of_the_standard_library_and_dlpack(comm):
    for typecode in "fdilqB":
        x = array.array(typecode, [1, 2, 3])
        comm.all_reduce(x)
        assert x.tolist() == [2, 4, 6], typecode
    data = bytearray([1, 2, 3])
    comm.all_reduce(data)
    assert data == bytearray([2, 4, 6])
    data.append(7)  # the call has let go of its memory
    comm.all_reduce(memoryview(data)[1:3])
    assert data == bytearray([2, 8, 12, 7])
    grid = memoryview(bytearray(24)).cast("i", (2, 3))
    comm.all_reduce(grid, "max")
    x = np.arange(5, dtype=np.float32)
    comm.all_reduce(OnlyDlpack(x))
    comm.all_reduce(OnlyDlpack(x), async_op=True).wait()
    np.testing.assert_array_equal(x, np.arange(5) * 4)


@on_ranks(3)
def test_all_reduce_takes_misaligned_arrays(comm):
    for dtype in (np.float32, np.float64, np.float16, np.int64):
        size = np.dtype(dtype).itemsize
        for count in (1, 1000, 50_001):
            for algorithm in ("ring/simple", "ring/ll", "one_shot/ll", "two_shot/simple"):
                memory = bytearray(count * size + 2)
                x = np.frombuffer(memory, dtype, count, offset=1)
                assert x.ctypes.data % size == 1 or size == 1
                x[:] = comm.rank + 1
                comm.all_reduce(x, algorithm=algorithm)
                assert (x == 6).all()
                assert (memory[0], memory[-1]) == (0, 0)  # nothing beside it was touched


@on_ranks(2)
def test_long_messages_come_to_any_place_of_a_page(comm):
    size, page = 300_001, 4096
    memory = np.empty(size + 2 * page, np.uint8)
    start = -memory.ctypes.data % page
    sent = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    # Slots begin 1,408 bytes into a page; copies to a place a little further on take another way.
    for place in (1, 2, 16, 63, 64, 1407, 1408, 1409, 1471, 1472, 4095):
        memory[:] = 0
        x = memory[start + place : start + place + size]
        if comm.rank == 0:
            x[:] = sent
        comm.broadcast(x)
        np.testing.assert_array_equal(x, sent)
        assert memory[start + place - 1] == memory[start + place + size] == 0


@pytest.mark.torch
@on_ranks(2, needs="torch")
def test_all_reduce_takes_torch_tensors(comm):
    import torch

    x = torch.full((2, 3), comm.rank + 1.0)
    assert comm.all_reduce(x) is x
    assert torch.equal(x, torch.full((2, 3), 3.0))
    out = torch.empty(2, 3)
    comm.all_reduce(x, "avg", out)
    assert torch.equal(out, x)
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    comm.all_reduce(parameter)
    assert torch.equal(parameter.detach(), torch.full((4,), 2.0, dtype=torch.float64))
    # Not backward(): in a thread of this process it would fix which devices autograd knows.
    parameter.grad = torch.ones_like(parameter)
    comm.all_reduce(parameter.grad)
    assert torch.equal(parameter.grad, torch.full((4,), 2.0, dtype=torch.float64))
    scalar = torch.tensor(1.5)
    comm.all_reduce(scalar, async_op=True).wait()
    assert scalar.item() == 3
    part = torch.zeros(10, dtype=torch.int32)[3:7]
    comm.broadcast(part.fill_(comm.rank), root=1)
    assert part.tolist() == [1] * 4
    comm.all_reduce(torch.zeros(2, 0, 8))  # whatever its strides are


def _read_only() -> np.ndarray:
    x = np.ones(4)
    x.flags.writeable = False
    return x


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "strided": (lambda: np.ones(10)[::2], "contiguous"),
    "transposed": (lambda: np.ones((3, 4)).T, "contiguous"),
    "reversed": (lambda: np.ones(4)[::-1], "contiguous"),
    "strided_memoryview": (lambda: memoryview(bytearray(8))[::2], "contiguous"),
    "strided_dlpack": (lambda: OnlyDlpack(np.ones((3, 4), np.float32).T), "contiguous"),
    "read_only": (_read_only, "read-only"),
    "read_only_dlpack": (lambda: OnlyDlpack(_read_only()), "read-?only"),
    "bytes": (lambda: b"1234", "read-only"),
    "objects": (lambda: np.array([None]), "dtype object.*references"),
    "records_of_objects": (lambda: np.zeros(4, [("a", object)]), "references"),
    "no_bytes": (lambda: np.zeros(4, "V0"), "no bytes"),
    "list": (lambda: [1.0, 2.0], "x is a list: expected an array"),
    "number": (lambda: 1.0, "x is a float"),
    "none": (lambda: None, "needs an array x"),
    "a_class": (lambda: np.ndarray, "x is a type"),
}


def test_array_that_cannot_be_used_raises_usage_error():
    (single,) = local_communicators(1)
    for collective in ("all_reduce", "broadcast"):
        call = getattr(single, collective)
        for name, (make, text) in REFUSED.items():
            check_refused({f"{collective} of {name}": (call, text)}, make())


# Elements that are in no row of the dtype table: copied as bytes, never reduced.
OPAQUE: dict[str, tuple[Callable[[], Any], str]] = {
    "big_endian": (lambda: np.arange(4).astype(">f4"), ">f4.*big-endian"),
    "strings": (lambda: np.array(["a", "bcd"]), "<U3"),
    "bytes": (lambda: np.array([b"a", b"bcd"]), r"\|S3"),
    "void": (lambda: np.array([b"abc"] * 5, "V3"), r"\|V3"),
    "dates": (lambda: np.array(["2024-02-29", "NaT"], "datetime64[ns]"), "datetime64"),
    "durations": (lambda: np.arange(3).astype("timedelta64[s]"), "timedelta64"),
    "records": (lambda: np.array([(1, 2.5)] * 3, [("O", np.int8), ("b", np.float64)]), "'O'"),
    "long_doubles": (lambda: np.arange(3).astype(np.longdouble), "float128|longdouble"),
    "large": (lambda: np.frombuffer(bytes(range(250)) * 1200, "V100000"), "V100000"),
    "characters": (lambda: array.array("u", "abc"), "'u'|'w'"),
    "record_buffer": (lambda: memoryview(np.zeros(3, "i4,f8")), "T{"),
}


@on_ranks(threads=[3])
def test_elements_of_any_type_are_copied(comm):
    for name, (make, text) in OPAQUE.items():
        x = make()
        if isinstance(x, np.ndarray):
            x = x.copy()  # writable
        view = np.asarray(x).view(np.uint8)
        expected = view.tobytes()
        for algorithm in (None, "binomial/ll", "binomial/simple"):
            if comm.rank != 1:
                view[:] = 0
            comm.broadcast(x, root=1, algorithm=algorithm)
            assert view.tobytes() == expected, name
        with pytest.raises(UsageError, match=f"x has dtype .*{text}.*, which pycoll can copy"):
            comm.all_reduce(x)


@on_ranks(2)
def test_elements_of_two_sizes_raise_mismatch(comm):
    with pytest.raises(pycoll.CollectiveMismatchError, match="opaque of 3 bytes"):
        comm.broadcast(np.zeros(4, "V3" if comm.rank == 0 else "V5"))
        comm.barrier()  # the root of a small message does not wait for the others


# Pairs of dtypes outside of the table whose elements have one size.
UNLIKE = [
    ("M8[s]", "M8[D]"),
    (">f8", "M8[s]"),
    (">f4", ">i4"),
    ("m8[s]", "M8[s]"),
    ("S4", "V4"),
    ("U2", "S8"),
    ([("a", "i4"), ("b", "f4")], [("a", "f4"), ("b", "i4")]),
]


def test_elements_of_two_types_of_one_size_raise_mismatch():
    def work(comm: Comm, i: int, how: str) -> str:
        x = np.zeros(3, UNLIKE[i][comm.rank])
        try:
            if how == "broadcast":
                comm.broadcast(x)
            elif how == "all_gather":
                comm.all_gather(x, counts=[3, 3])
            elif comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            comm.barrier()
        except pycoll.CollectiveMismatchError as error:
            return str(error)
        return "no error"

    for i, (first, second) in enumerate(UNLIKE):
        for how in ("broadcast", "all_gather", "message"):
            for text in pycoll.run_ranks(work, 2, i, how, threads=True):
                if how == "message":
                    assert "of another dtype" in text, (first, second, text)
                else:
                    assert f"({np.dtype(first)})" in text, (first, second, text)
                    assert f"({np.dtype(second)})" in text, (first, second, text)


@on_ranks(threads=[2])
def test_out_of_another_type_of_the_same_size_is_refused(comm):
    expected = r"elements of datetime64\[D\], expected 6 of datetime64\[s\]"
    with pytest.raises(UsageError, match=expected):
        comm.all_gather(np.zeros(3, "M8[s]"), np.zeros(6, "M8[D]"))


@pytest.mark.torch
def test_tensor_that_cannot_be_used_raises_usage_error():
    torch = pytest.importorskip("torch", reason="tests torch tensors")
    (single,) = local_communicators(1)
    for tensor, text in [
        (torch.ones(3, 4).t(), "contiguous"),
        (torch.ones(4, dtype=torch.complex32), "dtype torch.complex32.*copy"),
        (torch.ones(4, dtype=torch.uint8).view(torch.bits8), r"view\(torch.uint8\)"),
        (torch.ones(4, device="meta"), "meta|CPU memory"),
        (torch.ones(4).to_sparse(), "DLPack.*storage"),
    ]:
        with pytest.raises(UsageError, match=text):
            single.all_reduce(tensor)


def test_closed_communicator_refuses_every_call():
    (comm,) = local_communicators(1)
    comm.close()
    comm.close()
    assert comm.closed
    x = np.ones(4)
    for call in [
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x, async_op=True),
        lambda: comm.broadcast(x),
        lambda: comm.barrier(),
        lambda: comm.split(0),
    ]:
        with pytest.raises(UsageError, match="closed"):
            call()
    assert "closed" in repr(comm)


@on_ranks(2)
def test_context_manager_closes(comm: Comm):
    with comm.split(0) as part:
        assert not part.closed
        part.barrier()
    assert part.closed
    comm.barrier()
