"""Runs a program on one rank and checks every result against NumPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from answers import PERIOD, compare, counts_of, factor_of, oracle, values_of, with_counts
from places import Places
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
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments

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
    places: Places = field(init=False)

    def __post_init__(self) -> None:
        self.places = Places(self.world)

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
        self.places.unregister(keep=3)

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
            yield from exchange(comm, op, self.num_ops, self.places)
        else:
            assert isinstance(op, Collective)
            yield self.collective(comm, op)

    def collective(self, comm: pycoll.Communicator, op: Collective) -> tuple[Any, Check, object]:
        n, rank, root = comm.size, comm.rank, op.root % comm.size
        given = dict(arguments(op.name, root, op.op))
        if op.op == "premul":
            given["op"] = pycoll.premul(factor_of(op, rank))
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
        return self.places.new(comm, op.memory, op.shift, shape, dtype)

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


def content(op: Messages, idx: int) -> np.ndarray:
    base = np.random.default_rng([op.seed, idx]).integers(0, 256, PERIOD, np.uint8)
    return np.resize(base, op.messages[idx].nbytes)


def exchange(
    comm: pycoll.Communicator, op: Messages, turn: int, places: Places
) -> Iterator[tuple[Any, Check, object]]:
    """Sends and receives; those of the way "any" ask for any source, and check what came."""
    n, rank = comm.size, comm.rank
    rows = [(i, m.src % n, m.dst % n, m) for i, m in enumerate(op.messages)]

    def place(m: Message) -> np.ndarray:
        return places.new(comm, op.memory, op.shift, m.nbytes, np.uint8)

    def to_send(idx: int) -> np.ndarray:
        x = place(op.messages[idx])
        x[:] = content(op, idx)
        return x

    if op.way == "in_turn":  # one order for all ranks, so a blocked rank's peer arrives
        for i, src, dst, m in rows:
            handle = comm.send(to_send(i), dst, m.tag, async_op=True) if src == rank else None
            if dst == rank:
                got = comm.recv(place(m), src, m.tag)
                assert got.tobytes() == content(op, i).tobytes(), (op, i)
            if handle is not None and (handle.done() or dst == rank or i % 2):
                handle.wait()
            elif handle is not None:
                yield handle, is_none, op
        return
    is_noted = comm._is_coalescing
    options = {} if is_noted else {"async_op": True}

    def tag(m: Message) -> int:
        """With any source, a tag for each size of each turn, which no other message has."""
        return (turn + 1) * 1_000_000 + m.nbytes if op.way == "any" else m.tag

    for i, src, dst, m in rows:
        if src == rank:
            yield comm.send(to_send(i), dst, tag(m), **options), is_none, op
    for i, src, dst, m in rows:
        if dst != rank:
            continue
        y = place(m)
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
    runner.places.unregister()
