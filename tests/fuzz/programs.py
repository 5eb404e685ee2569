"""Random programs: what all ranks do, drawn once, and how hypothesis draws it.

A program is a list of frozen values with no array in it, so that a failing one can be printed,
pasted back, and run again. Ranks, roots and communicators are any numbers: the runner takes them
modulo what there is, so that every program means something on every number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from cases import INFO
from comm_cases import PROTOCOLS, builtin_algorithms
from hypothesis import strategies as st
from places import MEMORIES

from pycoll import _core
from pycoll.bench.oracle import COLLECTIVES as ORACLES

# Sizes at which a protocol, eager messages, slots or the single copy begin or end.
EDGES = (16 << 10, 64 << 10, 128 << 10, 512 << 10)
SMALL = (0, 1, 2, 3, 5, 8, 17, 40, 63, 64, 65, 255, 1000, 4099)

# Those of the core in NumPy, whose answers are the oracle.
DTYPES = {
    name: dtype
    for name, dtype in {
        "f16": np.float16, "f32": np.float32, "f64": np.float64, "c64": np.complex64,
        "c128": np.complex128, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
        "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
        "bf16": ml_dtypes.bfloat16, "f8_e4m3": ml_dtypes.float8_e4m3fn,
        "f8_e5m2": ml_dtypes.float8_e5m2, "bool": np.bool_,
    }.items()
    if name in [row[0] for row in _core.dtypes()]
}  # fmt: skip
OPS = _core.ops()


@dataclass(frozen=True)
class Collective:
    name: str
    nbytes: int  # of a rank's smallest block, rounded down to whole elements
    dtype: str
    op: str
    root: int
    algorithm: str | None
    memory: str  # plain; shared: comm.empty; registered; mixed: any of these; parents: the world's
    out: str  # none; own: an array of its own; within: in place, where the collective can
    counts: bool  # blocks of different sizes, where the collective can
    deterministic: bool
    asynchronous: bool
    comm: int
    seed: int
    shift: int = 0  # of the arrays, which of places.SHIFTS


@dataclass(frozen=True)
class Barrier:
    asynchronous: bool
    comm: int


@dataclass(frozen=True)
class Message:
    src: int
    dst: int
    tag: int
    nbytes: int


@dataclass(frozen=True)
class Messages:
    """Way: async (all sends before all receives), in_turn (each rank blocks in order), any."""

    messages: tuple[Message, ...]
    way: str
    comm: int
    seed: int
    memory: str = "plain"  # and shift: as a Collective's
    shift: int = 0


@dataclass(frozen=True)
class Coalesce:
    """A group of operations of one communicator; theirs are ignored."""

    ops: tuple[Collective | Messages | Barrier, ...]
    comm: int


@dataclass(frozen=True)
class Split:
    colors: tuple[int, ...]  # of the ranks of the communicator, cyclic
    backwards: bool
    comm: int


@dataclass(frozen=True)
class Close:
    comm: int


@dataclass(frozen=True)
class Delay:
    rank: int
    time_ms: int


@dataclass(frozen=True)
class Wait:
    """For everything that was started so far."""


Op = Collective | Barrier | Messages | Coalesce | Split | Close | Delay | Wait
Program = tuple[Op, ...]

shifts = st.sampled_from([0, 0, 0, 1, 2, 3])
numbers = st.integers(0, 59)  # a multiple of 1..5: modulo gives every rank equally often
rarely = st.sampled_from([False, False, False, True])
nbytes = st.one_of(
    st.sampled_from(SMALL),
    st.integers(0, 3000),
    st.builds(lambda edge, d: edge + d, st.sampled_from(EDGES), st.sampled_from([-8, -1, 0, 1, 9])),
    st.integers(0, 600_000),
)


@st.composite
def collectives(draw: st.DrawFn, coalesced: bool = False) -> Collective:
    name = draw(st.sampled_from(list(ORACLES)))
    memory = draw(st.sampled_from([*MEMORIES, "mixed", "plain"]))
    named = [None, *builtin_algorithms(name)]
    algorithm = draw(st.sampled_from(named))
    out = draw(st.sampled_from(["none", "own", "within"]))
    if algorithm is not None:
        protocols = ["", *(f"/{protocol}" for protocol in PROTOCOLS)]
        algorithm += draw(st.sampled_from(protocols if coalesced else [*protocols, "/direct"]))
        if algorithm.endswith("/direct"):
            # Arrays of this kind on all ranks, or `direct` is refused.
            memory, out = draw(st.sampled_from(["shared", "registered"])), "own"
    dtype = draw(st.sampled_from(list(DTYPES)))
    prefix = name in ("scan", "exscan")
    ops = [
        op for op in OPS if _core.why_unsupported(dtype, op) == "" and not (prefix and op == "avg")
    ]
    counts = (
        name in ("all_gather", "reduce_scatter", "all_to_all")
        and algorithm is None
        and draw(rarely)
    )
    return Collective(
        name=name,
        nbytes=draw(nbytes),
        dtype=dtype,
        op=draw(st.sampled_from(ops)) if INFO[name].has_op else "sum",
        root=draw(numbers) if INFO[name].has_root else 0,
        algorithm=algorithm,
        memory=memory,
        out=out,
        counts=counts,
        deterministic=bool(INFO[name].has_op) and algorithm is None and draw(rarely),
        asynchronous=not coalesced and "/direct" not in (algorithm or "") and draw(rarely),
        comm=draw(numbers),
        seed=draw(st.integers(0, 255)),
        shift=draw(shifts),
    )


def messages(coalesced: bool = False) -> st.SearchStrategy[Messages]:
    one = st.builds(Message, numbers, numbers, st.integers(0, 3), nbytes)
    return st.builds(
        Messages,
        st.lists(one, min_size=1, max_size=6).map(tuple),
        st.just("async") if coalesced else st.sampled_from(["async", "in_turn", "any"]),
        numbers,
        st.integers(0, 255),
        st.sampled_from(MEMORIES),
        shifts,
    )


def groups() -> st.SearchStrategy[Coalesce]:
    blocking = st.builds(Barrier, st.just(False), st.just(0))
    small = collectives(coalesced=True)
    anything = st.one_of(small, small, small, messages(coalesced=True), blocking)
    return st.builds(Coalesce, st.lists(anything, min_size=1, max_size=5).map(tuple), numbers)


def operations() -> st.SearchStrategy[Op]:
    kinds = {
        collectives(): 10,
        messages(): 3,
        groups(): 2,
        st.builds(Barrier, rarely, numbers): 1,
        st.builds(
            Split, st.lists(st.integers(-1, 2), min_size=1, max_size=5).map(tuple), rarely, numbers
        ): 1,
        st.builds(Close, numbers): 1,
        st.builds(Delay, numbers, st.integers(0, 20)): 1,
        st.just(Wait()): 1,
    }
    return st.one_of([kind for kind, weight in kinds.items() for _ in range(weight)])


def programs(at_least: int = 1, at_most: int = 40) -> st.SearchStrategy[Program]:
    return st.lists(operations(), min_size=at_least, max_size=at_most).map(tuple)


def as_text(program: Program) -> str:
    """As Python, one operation a line."""
    return "(\n" + "".join(f"    {op!r},\n" for op in program) + ")"
