"""Runs a program on one rank and checks every result against NumPy.

Input values are small whole numbers, of which every sum and product is exact in its type: a result
is right to the bit or wrong, whatever the order of the reduction. Only an average is rounded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from collective_oracles import INFO, ORACLES, arguments
from comm_cases import reduced
from programs import (
    DTYPES,
    Barrier,
    Close,
    Coalesce,
    Collective,
    Delay,
    Message,
    Messages,
    Op,
    Program,
    Split,
    Wait,
)

import pycoll

PERIOD = 4099  # prime: a block in the wrong place is seen
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
Check = Callable[[Any], None]


@dataclass
class Part:
    """A communicator and the world ranks of its members; None on ranks that are not among them."""

    comm: pycoll.Communicator | None
    members: list[int]


@dataclass
class Runner:
    world: pycoll.Communicator
    parts: list[Part]
    pending: list[tuple[Any, Check, object]] = field(default_factory=list)
    num_ops: int = 0

    def run(self, op: Op) -> None:
        """Does this rank's part of an operation."""
        self.num_ops += 1
        if isinstance(op, Delay):
            if op.rank % self.world.size == self.world.rank:
                time.sleep(op.time_ms / 1e3)
        elif isinstance(op, Wait):
            self.wait()
        elif isinstance(op, Close):
            self.close(op)
        elif isinstance(op, Split):
            self.split(op)
        else:
            part = self.parts[op.comm % len(self.parts)]
            if part.comm is None:
                return
            if isinstance(op, Coalesce):
                self.wait()
                checks: list[tuple[Any, Check, object]] = []
                with part.comm.coalesce():
                    for inner in op.ops:
                        checks += self.start(part.comm, inner)
                for result, check, what in checks:
                    verify(result, check, what)
                return
            for handle, check, what in self.start(part.comm, op):
                if isinstance(handle, pycoll.Work):
                    self.pending.append((handle, check, what))
                else:
                    verify(handle, check, what)

    def wait(self) -> None:
        for handle, check, what in self.pending:
            verify(handle.wait(), check, what)
            assert handle.done() and handle.exception() is None, what
        self.pending.clear()

    def close(self, op: Close) -> None:
        idx = op.comm % len(self.parts)
        if idx == 0:  # the world stays
            return
        self.wait()
        part = self.parts.pop(idx)
        if part.comm is not None:
            part.comm.close()

    def split(self, op: Split) -> None:
        parent = self.parts[op.comm % len(self.parts)]
        n = len(parent.members)
        colors = [op.colors[r % len(op.colors)] for r in range(n)]
        mine: dict[int, Part] = {}
        if parent.comm is not None:
            rank = parent.comm.rank
            made = parent.comm.split(colors[rank], key=-rank if op.backwards else 0)
            assert (made is None) == (colors[rank] < 0), op
            mine[colors[rank]] = Part(made, [])
        # Every rank keeps the parts of all colors, so that their numbers mean the same everywhere.
        for color in sorted(set(colors) - {-1}):
            part = mine.get(color, Part(None, []))
            part.members = [parent.members[r] for r in range(n) if colors[r] == color]
            if op.backwards:
                part.members.reverse()
            if part.comm is not None:
                assert part.comm.size == len(part.members), op
                assert part.members[part.comm.rank] == self.world.rank, op
            self.parts.append(part)

    def start(self, comm: pycoll.Communicator, op: Op) -> Iterator[tuple[Any, Check, object]]:
        """Begins an operation; what it gave, or a Work on it, and how to check that."""
        if isinstance(op, Barrier):
            handle = comm.barrier(async_op=True) if op.asynchronous else comm.barrier()
            yield handle, is_none, op
        elif isinstance(op, Messages):
            yield from exchange(comm, op, self.num_ops)
        else:
            assert isinstance(op, Collective)
            yield self.collective(comm, op)

    def collective(self, comm: pycoll.Communicator, op: Collective) -> tuple[Any, Check, object]:
        n, rank, root = comm.size, comm.rank, op.root % comm.size
        given = dict(arguments(op.name, root, op.op))
        if op.algorithm is not None:
            given["algorithm"] = op.algorithm
        if op.deterministic:
            given["deterministic"] = True
        if op.asynchronous:
            given["async_op"] = True
        if op.counts:
            inputs, expected, more = with_counts(op, n, rank)
            given.update(more)
        else:
            rows = op.nbytes // np.dtype(DTYPES[op.dtype]).itemsize
            shape = ORACLES[op.name].leading(n, rows)
            values = values_of(op, n, shape)
            inputs, expected = values[rank], oracle(op, values, rank, root)
        if expected is not None:
            expected = expected.astype(inputs.dtype)
        x = self.place(comm, op, inputs)
        out = self.out_of(comm, op, x, expected, rank)
        if out is not None:
            given["out"] = out
            if out.base is not None and op.out == "within" and op.name == "all_gather":
                x = within(op, out, expected, inputs, rank, n)
        before = None if is_written(op, given) else x.copy()
        try:
            result = getattr(comm, op.name)(x, **given)
        except pycoll.UsageError as error:
            # Not every algorithm can do everything directly; it says so before anything is sent.
            if op.algorithm is None or not op.algorithm.endswith("/direct"):
                raise
            assert "direct" in str(error), error
            return None, is_none, op

        def check(got: Any) -> None:
            if out is not None:
                assert got is out or got is None, "the result is not out"
            if expected is not None:
                compare(op, got, expected)
            elif op.name != "exscan":
                assert got is None, "a rank got what was not for it"
            if before is not None:
                assert x.tobytes() == before.tobytes(), "x was changed"

        return result, check, op

    def place(self, comm: pycoll.Communicator, op: Collective, x: np.ndarray) -> np.ndarray:
        """A copy of x where the operation wants it."""
        y = self.memory(comm, op, x.shape, x.dtype)
        y[...] = x
        return y

    def memory(
        self, comm: pycoll.Communicator, op: Collective, shape: Any, dtype: Any
    ) -> np.ndarray:
        if op.memory == "parents":
            return self.world.empty(shape, dtype)
        if op.memory == "shared" or (op.memory == "mixed" and (comm.rank + op.seed) % 2):
            return comm.empty(shape, dtype)
        return np.empty(shape, dtype)

    def out_of(
        self,
        comm: pycoll.Communicator,
        op: Collective,
        x: np.ndarray,
        expected: np.ndarray | None,
        rank: int,
    ) -> np.ndarray | None:
        if op.out == "none" or op.name == "broadcast":
            return None
        like = x if op.name == "exscan" else expected
        if like is None:
            return None
        if op.out == "within":
            if ORACLES[op.name].in_place:
                return x
            if op.name == "reduce_scatter" and not op.counts:
                return x.reshape(comm.size, *like.shape)[rank]
            if op.name != "all_gather":
                return None
            whole = self.memory(comm, op, (1, *like.shape), like.dtype)
            return whole[0]
        return self.memory(comm, op, like.shape, like.dtype)


def is_none(got: Any) -> None:
    assert got is None


def verify(result: Any, check: Check, what: object) -> None:
    try:
        check(result)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def within(
    op: Collective, out: np.ndarray, expected: Any, inputs: np.ndarray, rank: int, n: int
) -> np.ndarray:
    """This rank's block of out, filled with its input."""
    rows = len(inputs)
    begin = sum(counts_of(op, n)[:rank]) if op.counts else rank * rows
    x = out[begin : begin + rows]
    x[...] = inputs
    return x


def is_written(op: Collective, given: dict[str, Any]) -> bool:
    """Whether x may be changed."""
    if op.out == "within" or op.name == "broadcast":
        return True
    return ORACLES[op.name].in_place and given.get("out") is None


def values_of(op: Collective, n: int, shape: tuple[int, ...]) -> np.ndarray:
    """The inputs of all ranks: exact under the operator, periodic with a prime."""
    dtype = np.dtype(DTYPES[op.dtype])
    rng = np.random.default_rng([op.seed, n])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        base = rng.integers(limits.min, limits.max, (n, PERIOD), dtype, endpoint=True)
    elif op.op == "prod":
        base = rng.choice([1, 2, -1], (n, PERIOD)).astype(dtype)
    else:
        base = rng.integers(-300, 300, (n, PERIOD)).astype(dtype)
    count = int(np.prod(shape))
    return np.stack([np.resize(row, count) for row in base]).reshape(n, *shape)


def oracle(op: Collective, values: np.ndarray, rank: int, root: int) -> np.ndarray | None:
    if op.op in BITWISE and INFO[op.name].has_op:
        combine = BITWISE[op.op]
        if op.name in ("scan", "exscan"):
            end = rank + (op.name == "scan")
            return combine.reduce(values[:end]) if end else None
        total = combine.reduce(values)
        if op.name == "reduce":
            return total if rank == root else None
        return total.reshape(len(values), -1)[rank] if op.name == "reduce_scatter" else total
    if values.dtype.kind == "c" and INFO[op.name].has_op:
        real, imaginary = (oracle(op, part, rank, root) for part in (values.real, values.imag))
        return None if real is None else real + 1j * imaginary
    return ORACLES[op.name].expected(values, rank, root, op.op)


def compare(op: Collective, got: Any, expected: np.ndarray) -> None:
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    dtype = np.dtype(DTYPES[op.dtype])
    assert got.dtype == dtype, f"dtype {got.dtype}"
    if op.op == "avg" and dtype.kind in "fc" and INFO[op.name].has_op:
        right = np.abs(got - expected) <= 4 * np.finfo(dtype).eps * np.abs(expected)
    else:
        right = got == expected
    if not right.all():
        where = np.argwhere(~right)
        first = tuple(where[0])
        raise AssertionError(
            f"{len(where)} of {got.size} elements differ, the first at {first}: "
            f"{got[first]}, expected {expected[first]}"
        )


def counts_of(op: Collective, n: int) -> list[int]:
    rows = op.nbytes // np.dtype(DTYPES[op.dtype]).itemsize
    return [rows * ((op.seed + 3 * rank) % 4) // 2 for rank in range(n)]


def with_counts(op: Collective, n: int, rank: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Input, result and the counts to pass, of blocks that differ in size."""
    counts = counts_of(op, n)
    ends = np.cumsum(counts)
    if op.name == "all_gather":
        values = [values_of(op, n, (count,))[r] for r, count in enumerate(counts)]
        return values[rank], np.concatenate(values), {"counts": counts}
    if op.name == "reduce_scatter":
        values = values_of(op, n, (sum(counts),))
        total = oracle_of_sum(op, values)
        mine = slice(ends[rank] - counts[rank], ends[rank])
        return values[rank], total[mine], {"counts": counts}
    # Rank s sends counts[(s + d) % n] rows to rank d.
    table = [[counts[(s + d) % n] for d in range(n)] for s in range(n)]
    values = values_of(op, n, (sum(counts),))
    pieces = []
    for s in range(n):
        begin = sum(table[s][:rank])
        pieces.append(values[s][begin : begin + table[s][rank]])
    more: dict[str, Any] = {"send_counts": table[rank]}
    if op.seed % 2:
        more["recv_counts"] = [table[s][rank] for s in range(n)]
    return values[rank], np.concatenate(pieces), more


def oracle_of_sum(op: Collective, values: np.ndarray) -> np.ndarray:
    if op.op in BITWISE:
        return BITWISE[op.op].reduce(values)
    if values.dtype.kind == "c":
        return reduced(values.real, op.op) + 1j * reduced(values.imag, op.op)
    return reduced(values, op.op)


def content(op: Messages, idx: int) -> np.ndarray:
    base = np.random.default_rng([op.seed, idx]).integers(0, 256, PERIOD, np.uint8)
    return np.resize(base, op.messages[idx].nbytes)


def exchange(
    comm: pycoll.Communicator, op: Messages, turn: int
) -> Iterator[tuple[Any, Check, object]]:
    """Sends and receives; those of the way "any" ask for any source, and check what came."""
    n, rank = comm.size, comm.rank
    rows = [(i, m.src % n, m.dst % n, m) for i, m in enumerate(op.messages)]
    if op.way == "in_turn":  # one order for all: whoever blocks, the other side comes
        for i, src, dst, m in rows:
            handle = comm.send(content(op, i), dst, m.tag, async_op=True) if src == rank else None
            if dst == rank:
                got = comm.recv(np.empty(m.nbytes, np.uint8), src, m.tag)
                assert got.tobytes() == content(op, i).tobytes(), (op, i)
            if handle is not None and (handle.done() or dst == rank or i % 2):
                handle.wait()
            elif handle is not None:
                yield handle, is_none, op
        return
    is_noted = comm._is_coalescing
    options = {} if is_noted else {"async_op": True}

    def tag(m: Message) -> int:
        """Where any source will do, one for each size of each turn: no other message has it."""
        return (turn + 1) * 1_000_000 + m.nbytes if op.way == "any" else m.tag

    for i, src, dst, m in rows:
        if src == rank:
            yield comm.send(content(op, i), dst, tag(m), **options), is_none, op
    for i, src, dst, m in rows:
        if dst != rank:
            continue
        y = np.empty(m.nbytes, np.uint8)
        if op.way == "any":
            may_be = [content(op, j) for j, _, d, o in rows if d == rank and o.nbytes == m.nbytes]
            comm.recv_any(y, tag(m))
            assert any(y.tobytes() == one.tobytes() for one in may_be), (op, i)
        else:
            right = content(op, i).tobytes()
            got = comm.recv(y, src, tag(m), **options)
            yield got, lambda got, right=right: same_bytes(got, right), (op, i)


def same_bytes(got: Any, right: bytes) -> None:
    assert got.tobytes() == right, "another message than was sent"


def run_program(comm: pycoll.Communicator, program: Program) -> None:
    """Runs it all, then waits for every rank and leaves."""
    runner = Runner(comm, [Part(comm, list(range(comm.size)))])
    for idx, op in enumerate(program):
        try:
            runner.run(op)
        except (pycoll.PeerDiedError, pycoll.AbortedError):
            raise  # run_ranks knows these for echoes of another rank's error
        except Exception as error:
            raise AssertionError(f"operation {idx} of the program, {op}: {error!r}") from error
    runner.wait()
    comm.barrier()
    for part in runner.parts[1:]:
        with contextlib.suppress(AttributeError):
            part.comm.close()
