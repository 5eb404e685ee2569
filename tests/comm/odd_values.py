"""Odd values for the arguments of a call: numbers, texts, objects, and what looks like an array."""

from __future__ import annotations

import array
import ctypes
import decimal
import fractions
import random
from collections.abc import Callable
from typing import Any

import numpy as np

MAX_TEXT = 400
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)


class Odd:
    """An object whose attributes are those of the case."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def cuda_interface(**changed: Any) -> Odd:
    interface = {"shape": (3,), "typestr": "<f4", "data": (4096, False), "version": 3} | changed
    return Odd(__cuda_array_interface__={k: v for k, v in interface.items() if v != "none"})


def dlpack(result: Any) -> Odd:
    return Odd(__dlpack__=lambda: result, __dlpack_device__=lambda: (1, 0))


class DLTensor(ctypes.Structure):
    """A DLManagedTensor without context and deleter."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


_kept: list[Any] = []


def capsule(ndim: int, shape: list[int] | None, data: int | None = 4096) -> Any:
    sizes = (ctypes.c_int64 * len(shape))(*shape) if shape is not None else None
    at = ctypes.addressof(sizes) if sizes is not None else None
    tensor = DLTensor(data, (1, 0), ndim, 2, 32, 1, at, None, 0, None, None)
    _kept.extend([sizes, tensor])
    return new_capsule(ctypes.addressof(tensor), b"dltensor", None)


def arrays() -> dict[str, Any]:
    """Objects that look like arrays."""
    return {
        "dlpack None": dlpack(None),
        "dlpack text": dlpack("capsule"),
        "dlpack capsule with another name": dlpack(new_capsule(4096, b"other", None)),
        "dlpack with -1 dimensions": dlpack(capsule(-1, None)),
        "dlpack with 2**30 dimensions": dlpack(capsule(1 << 30, [1])),
        "dlpack without a shape": dlpack(capsule(2, None)),
        "dlpack with a negative size": dlpack(capsule(1, [-5])),
        "dlpack with 2**64 bytes": dlpack(capsule(2, [1 << 40, 1 << 40])),
        "dlpack without an address": dlpack(capsule(1, [5], None)),
        "cuda interface None": Odd(__cuda_array_interface__=None),
        "cuda interface 5": Odd(__cuda_array_interface__=5),
        "cuda interface empty": Odd(__cuda_array_interface__={}),
        "cuda interface without data": cuda_interface(data="none"),
        "cuda data text": cuda_interface(data="12"),
        "cuda data of one": cuda_interface(data=(1,)),
        "cuda address text": cuda_interface(data=("a", False)),
        "cuda address too large": cuda_interface(data=(1 << 70, False)),
        "cuda typestr empty": cuda_interface(typestr=""),
        "cuda typestr x": cuda_interface(typestr="x"),
        "cuda typestr without a size": cuda_interface(typestr="<fx"),
        "cuda typestr with a huge size": cuda_interface(typestr="|V99999999999999999999999"),
        "cuda shape None": cuda_interface(shape=None),
        "cuda shape of text": cuda_interface(shape=("a",)),
        "cuda shape negative": cuda_interface(shape=(-4,)),
        "cuda shape too large": cuda_interface(shape=(1 << 40, 1 << 40)),
        "cuda strides of another length": cuda_interface(shape=(2, 3), strides=(4,)),
        "cuda strides of text": cuda_interface(shape=(2, 3), strides=("a", "b")),
    }


class OddError(Exception):
    """What the methods of some odd objects raise; a call may pass it on."""


class OddKeyError(OddError, KeyError):
    pass


HOOKS = (
    "__index__", "__int__", "__float__", "__complex__", "__bool__", "__len__", "__iter__",
    "__getitem__", "__eq__", "__hash__", "__str__", "__repr__", "__format__", "__array__",
    "__array_interface__", "__array_struct__", "__dlpack__", "__dlpack_device__",
    "__cuda_array_interface__", "__getattr__", "__getattribute__", "__class__", "__fspath__",
    "__call__", "__next__", "__lt__", "__gt__", "__le__", "__contains__", "__del__",
)  # fmt: skip
RESULTS = (None, "text", b"x", -1, 1 << 80, 1.5, float("nan"), (), [1, 2], {}, object(), int)


def hooked(hooks: list[str], reply: Callable[[], Any]) -> Any:
    """An object whose methods of these names end with `reply`."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return reply()

    attributes = (
        "__array_interface__",
        "__array_struct__",
        "__cuda_array_interface__",
        "__class__",
    )
    body: dict[str, Any] = {
        name: property(method) if name in attributes else method for name in hooks
    }
    if "__del__" in body:  # an error in it is only printed
        body["__del__"] = lambda self: None
    return type("Hooked", (), body)()


def raises(error: type[BaseException]) -> Callable[[], Any]:
    def reply() -> Any:
        raise error("an odd object")

    return reply


def hooked_at_random(rng: random.Random) -> Any:
    hooks = rng.sample(HOOKS, rng.choice((1, 1, 3, len(HOOKS))))
    if rng.random() < 0.5:
        return hooked(hooks, raises(rng.choice((OddError, OddKeyError))))
    result = rng.choice(RESULTS)
    return hooked(hooks, lambda: result)


class ShrinkingList(list[Any]):
    """A list that is empty once its first item has been read as a number."""

    def __init__(self, length: int) -> None:
        super().__init__([self.Item(self)] + [1] * (length - 1))

    class Item:
        def __init__(self, whole: list[Any]) -> None:
            self.whole = whole

        def __index__(self) -> int:
            self.whole.clear()
            return 1


class Resizing:
    """A number that takes the memory of an array away when it is read."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __index__(self) -> int:
        if type(self.x) is np.ndarray:  # another odd value may stand in its place
            self.x.resize(1 << 20 if self.x.size < 1000 else 1, refcheck=False)
        return 0

    def __float__(self) -> float:
        return float(self.__index__())

    def __bool__(self) -> bool:
        return bool(self.__index__())


def recursive() -> list[Any]:
    one: list[Any] = []
    one.append(one)
    return one


def deep(levels: int) -> Any:
    inner: Any = 1
    for _ in range(levels):
        inner = [inner]
    return inner


class WrongText(str):
    """A str whose methods lie."""

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return "another text"

    def __eq__(self, other: object) -> bool:
        return True

    def encode(self, *args: Any) -> bytes:
        raise OddError("no bytes")


def numbers() -> list[Any]:
    whole = [0, -1, 1, 2, 3, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31) - 1]
    whole += [1 << 32, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, (1 << 64) - 1, 1 << 64, 1 << 70]
    odd: list[Any] = [1 << 5000, True, False, 0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e300, 5e-324]
    odd += [float("nan"), float("inf"), -float("inf"), 1j, decimal.Decimal("NaN")]
    odd += [
        decimal.Decimal("1e999999"),
        fractions.Fraction(1, 3),
        np.int8(-1),
        np.uint64(2**64 - 1),
    ]
    odd += [np.float32("nan"), np.float64(1), np.bool_(True), np.array(1), np.array([1, 2])]
    return [*whole, *odd, np.datetime64("NaT"), np.timedelta64(1, "s"), np.longdouble(1)]


def texts() -> list[Any]:
    return [
        "", " ", "\0", "sum\0", "SUM", "sum ", "\ud800", "a" * (1 << 20), "\x1b[31m\n", "%s%n{0}{}",
        "../../etc/passwd", "ring/simple/ll", "auto", "1", "-1", "nan", "\u202e", "𝒳" * 300,
        b"sum", b"\xff", bytearray(b"sum"), WrongText("sum"), WrongText("x" * 5000), "ring",
        "all_reduce",
        "127.0.0.1:99999", "[::1]:1", "127.0.0.1:" + "9" * 5000, "host\0:1", ":",
        "cuda:0", "cuda:-1", "f32", "object", "O", "S0", "V0", "f8,f4",
    ]  # fmt: skip


def objects() -> list[Any]:
    return [
        None, object(), object, int, len, lambda: 1, Ellipsis, NotImplemented, {}, set(), {1: 2},
        [], (), [[]], [None], ["a"], [1.5], [-1], [1 << 80], [0, 0], [0, 9], (i for i in (0, 1)),
        range(1 << 40), range(-5), recursive(), deep(100), deep(100_000), [1] * (1 << 16), iter(()),
        slice(None), memoryview(b"abc"), ShrinkingList(2), ShrinkingList(3), OddError,
        OddError("x"), np, np.dtype("O"), np.dtype([("a", "O")]), np.void, Odd(), random,
    ]  # fmt: skip


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


def host_arrays() -> list[Any]:
    read_only = np.ones(4)
    read_only.setflags(write=False)
    misaligned = np.frombuffer(bytearray(33)[1:], np.uint8)[:32].view("f8")
    overlapping = np.lib.stride_tricks.as_strided(np.ones(4), (4, 4), (8, 8))
    huge = np.broadcast_to(np.ones(1), (1 << 20, 1 << 20))
    of_objects = np.ones(4, [("a", "f4"), ("b", "O")])
    return [
        np.ones(0), np.ones(1), np.ones(3), np.array(1.0), np.ones((2, 0, 3)), np.ones((1,) * 32),
        read_only, np.ones(8)[::2], np.ones(8)[::-1], np.ones((3, 4)).T, misaligned, overlapping,
        np.ones(4, ">f8"), np.ones(4, "O"), np.array(["a", "b"]), np.array([b"a", b"bc"]), huge,
        np.ones(4, "M8[s]"), np.ones(4, "m8[D]"), np.ones(4, np.longdouble), np.ones(4, "c16"),
        np.ones(4, bool), np.ones(4, "V7"), of_objects, np.ones(4, [("a", "f4"), ("b", "i4")]),
        np.ma.masked_array(np.ones(4), [1, 0, 0, 1]), np.ones(4).view(np.recarray), b"1234",
        bytearray(16), array.array("d", [1, 2]), memoryview(np.ones(4)), released(), 1.0,
        (ctypes.c_double * 4)(), [1.0, 2.0], np.float64(1), memoryview(bytearray(16))[::2],
    ]  # fmt: skip


def pick(rng: random.Random, x: np.ndarray | None = None) -> Any:
    """An odd value. `x` is the array of the call, for values that change it meanwhile."""
    kind = rng.choice(("number", "text", "object", "host", "array", "hooked", "hooked", "resize"))
    if kind == "hooked":
        return hooked_at_random(rng)
    if kind == "resize" and x is not None:
        return Resizing(x)
    tables: dict[str, Callable[[], list[Any]]] = {
        "number": numbers, "text": texts, "object": objects, "host": host_arrays,
    }  # fmt: skip
    if kind in tables:
        return rng.choice(tables[kind]())
    return rng.choice(list(arrays().values()))
