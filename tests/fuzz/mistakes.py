"""One rank makes another call than the others: the kinds of mistake, and the errors that follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

import pycoll
from pycoll import CollectiveMismatchError

Comm = pycoll.Communicator
SIZES = (1, 7, 1000, 4096, 16_385, 40_000, 131_073)  # elements of f32


@dataclass(frozen=True)
class Mistake:
    """A wrong call of one rank, among calls that agree."""

    kind: str
    odd: int  # the rank, modulo how many there are
    count: int
    healthy: int  # calls that agree before
    late: int  # the rank, modulo the number of ranks, that comes last
    late_ms: int
    choice: int  # of what the kind can choose from


def all_reduce(comm: Comm, m: Mistake) -> None:
    comm.all_reduce(np.ones(m.count, np.float32))


def other_collective(comm: Comm, m: Mistake) -> None:
    x = np.ones((comm.size * m.count,), np.float32)
    calls: list[Callable[[], object]] = [
        comm.barrier,
        lambda: comm.broadcast(x[: m.count], root=m.choice % comm.size),
        lambda: comm.all_gather(x[: m.count]),
        lambda: comm.reduce_scatter(x),
        lambda: comm.all_to_all(x),
        lambda: comm.scan(x[: m.count]),
        lambda: comm.gather(x[: m.count], root=m.choice % comm.size),
    ]
    calls[m.choice % len(calls)]()


def other_shape(comm: Comm, m: Mistake) -> None:
    shapes = [(m.count + 1,), (0,), (m.count, 2), (m.count, 1), (1, m.count)]
    comm.all_reduce(np.ones(shapes[m.choice % len(shapes)], np.float32))


def other_dtype(comm: Comm, m: Mistake) -> None:
    dtypes = [np.float64, np.int32, np.float16, np.uint8]
    comm.all_reduce(np.ones(m.count, dtypes[m.choice % len(dtypes)]))


def other_op(comm: Comm, m: Mistake) -> None:
    comm.all_reduce(np.ones(m.count, np.float32), ("max", "min", "prod", "avg")[m.choice % 4])


def rooted(comm: Comm, m: Mistake, root: int) -> None:
    x = np.ones(m.count * (comm.size if m.choice % 4 == 3 else 1), np.float32)
    calls = (comm.broadcast, comm.reduce, comm.gather, comm.scatter)
    calls[m.choice % 4](x, root=root % comm.size)


def uneven(comm: Comm, m: Mistake, is_odd: bool) -> None:
    """The odd rank expects of its right neighbour one row more than that one sends."""
    send, recv = [m.count % 5000] * comm.size, [m.count % 5000] * comm.size
    if is_odd:
        recv[(comm.rank + 1) % comm.size] += 1
    comm.all_to_all(np.ones(sum(send), np.float32), None, send, recv)


def in_order(*calls: Callable[[Comm, Mistake], None]) -> Callable[[Comm, Mistake], None]:
    def both(comm: Comm, m: Mistake) -> None:
        for call in calls:
            call(comm, m)

    return both


def nothing(comm: Comm, m: Mistake) -> None:
    pass


def barrier(comm: Comm, m: Mistake) -> None:
    comm.barrier()


# The call of the other ranks, and the call of the odd one.
Call = Callable[[Comm, Mistake], None]
KINDS: dict[str, tuple[Call, Call]] = {
    "collective": (all_reduce, other_collective),
    "shape": (all_reduce, other_shape),
    "dtype": (all_reduce, other_dtype),
    "op": (all_reduce, other_op),
    "root": (lambda c, m: rooted(c, m, m.choice), lambda c, m: rooted(c, m, m.choice + 1)),
    "order": (in_order(all_reduce, barrier), in_order(barrier, all_reduce)),
    "split_sizes": (lambda c, m: uneven(c, m, False), lambda c, m: uneven(c, m, True)),
    "skip": (all_reduce, nothing),
}


def mistakes(kinds: list[str] | None = None) -> st.SearchStrategy[Mistake]:
    number = st.integers(0, 59)
    return st.builds(
        Mistake,
        kind=st.sampled_from(kinds or list(KINDS)),
        odd=number,
        count=st.sampled_from(SIZES),
        healthy=st.integers(0, 3),
        late=number,
        late_ms=st.sampled_from([0, 0, 1, 5]),
        choice=number,
    )


@dataclass(frozen=True)
class Seen:
    """The times and the error of one rank."""

    entered_s: float  # the monotonic clock, when it began the call
    raised_s: float
    error: str  # class, empty for none
    text: str


def make(comm: Comm, m: Mistake) -> Seen:
    """Makes the mistake in a communicator of its own; the calls go on until one raises.

    A rank that does not wait in the call itself, as a root, may raise in the next one, so there is
    a barrier after it. After a skipped call that is what the odd rank calls instead.
    """
    n, rank = comm.size, comm.rank
    right, wrong = KINDS[m.kind]
    with comm.split(0) as part:
        for _ in range(m.healthy):
            all_reduce(part, m)
        comm.barrier()
        if rank == m.late % n:
            time.sleep(m.late_ms / 1e3)
        seen = Seen(time.monotonic(), 0, "", "")
        try:
            (wrong if rank == m.odd % n else right)(part, m)
            part.barrier()
            part.barrier()
        except pycoll.Error as error:
            seen = Seen(seen.entered_s, time.monotonic(), type(error).__name__, str(error))
        comm.barrier()  # no rank leaves while another one still checks
    return seen


def complaint(m: Mistake, outcomes: list[Seen]) -> str:
    """The first wrong outcome, in words; empty: all are right."""
    odd = m.odd % len(outcomes)
    for rank, seen in enumerate(outcomes):
        if seen.error != CollectiveMismatchError.__name__:
            return f"rank {rank} raised {seen.error or 'nothing'}: {seen.text}"
        if m.kind != "split_sizes" and len(outcomes) > 2 and f"rank {odd} called" not in seen.text:
            return f"rank {rank} does not name rank {odd}: {seen.text}"
    return ""


def took_s(outcomes: list[Seen]) -> float:
    """From the last rank's entry to the last rank's error."""
    return max(s.raised_s for s in outcomes) - max(s.entered_s for s in outcomes)
