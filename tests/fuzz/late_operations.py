"""Operations for the tries with late ranks; each checks what it returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from late_arrays import Array

import pycoll

Comm = pycoll.Communicator
Operation = Callable[[Comm, Array, Array, int], int]


def value_of(step: int, rank: int) -> int:
    """The value of a rank's array in a step; sums of it are exact."""
    return step % 1000 * 8 + rank + 1


def total_of(step: int, size: int) -> int:
    return sum(value_of(step, rank) for rank in range(size))


def wrong_in(comm: Comm, array: Array, expected: float | np.ndarray) -> int:
    """Elements that differ, once calls that return after their launch have ended."""
    if array.is_on_device:
        comm.synchronize()  # raises the error of the call
    return array.other_than(expected)


def begin(comm: Comm, x: Array, out: Array, step: int) -> None:
    x.fill(value_of(step, comm.rank))
    out.fill(-1)


def wait_for_all(works: Sequence[pycoll.Work]) -> None:
    """Arrays belong to the caller again only when each work has ended."""
    errors = []
    for work in works:
        try:
            work.wait()
        except pycoll.Error as error:
            errors.append(error)
    if errors:
        raise errors[0]


def all_reduce(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    comm.all_reduce(x.given, "sum", out.given)
    return wrong_in(comm, out, total_of(step, comm.size))


def in_place(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    comm.all_reduce(x.given)
    return wrong_in(comm, x, total_of(step, comm.size))


def two_shot(comm: Comm, x: Array, out: Array, step: int) -> int:
    """The protocol direct lets ranks write each other's outputs, where the arrays allow it."""
    begin(comm, x, out, step)
    algorithm = "two_shot/direct" if x.is_reached_by_kernels else "two_shot"
    comm.all_reduce(x.given, "sum", out.given, algorithm=algorithm)
    return wrong_in(comm, out, total_of(step, comm.size))


def broadcast(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    root = step % comm.size
    comm.broadcast(x.given, root)
    return wrong_in(comm, x, value_of(step, root))


def reduce(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    root = step % comm.size
    is_root = comm.rank == root
    comm.reduce(x.given, root, "sum", out.given if is_root else None)
    return wrong_in(comm, out, total_of(step, comm.size) if is_root else -1)


def all_to_all(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    n = comm.size
    comm.all_to_all(x.given, out.given)
    expected = np.repeat([value_of(step, rank) for rank in range(n)], len(x) // n)
    return wrong_in(comm, out, expected)


def messages(comm: Comm, x: Array, out: Array, step: int) -> int:
    """Around a ring: the size decides whether they are eager, in parts, or pulled."""
    begin(comm, x, out, step)
    n = comm.size
    before = (comm.rank - 1) % n
    receive = comm.recv(out.given, before, async_op=True)
    error: pycoll.Error | None = None
    try:
        comm.send(x.given, (comm.rank + 1) % n)
    except pycoll.Error as raised:
        error = raised
    wait_for_all([receive])
    if error is not None:
        raise error
    return wrong_in(comm, out, value_of(step, before))


def blocking_messages(comm: Comm, x: Array, out: Array, step: int) -> int:
    """From rank to rank, along the chain and with no other thread."""
    begin(comm, x, out, step)
    if comm.rank != 0:
        comm.recv(out.given, comm.rank - 1)
    if comm.rank != comm.size - 1:
        comm.send(x.given, comm.rank + 1)
    return wrong_in(comm, out, value_of(step, comm.rank - 1) if comm.rank != 0 else -1)


def works(comm: Comm, x: Array, out: Array, step: int) -> int:
    """Asynchronous collectives and messages at a time; all are queued before the first wait."""
    begin(comm, x, out, step)
    n = comm.size
    small, token = np.full(5, step, np.int64), np.zeros(1, np.int64)
    before = (comm.rank - 1) % n
    wait_for_all(
        [
            comm.all_reduce(x.given, "sum", out.given, async_op=True),
            comm.recv(token, before, async_op=True),
            comm.send(np.array([step]), (comm.rank + 1) % n, async_op=True),
            comm.all_reduce(small, async_op=True),
            comm.broadcast(x.given, step % n, async_op=True),
        ]
    )
    wrong = wrong_in(comm, out, total_of(step, n)) + wrong_in(comm, x, value_of(step, step % n))
    return wrong + int((small != step * n).sum()) + int(token[0] != step)


def coalesced(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    n = comm.size
    before = (comm.rank - 1) % n
    small = [np.full(3 + i, step, np.int64) for i in range(3)]
    with comm.coalesce():
        comm.send(x.given, (comm.rank + 1) % n)
        comm.recv(out.given, before)
        for part in small:
            comm.all_reduce(part)
    wrong = sum(int((part != step * n).sum()) for part in small)
    return wrong + wrong_in(comm, out, value_of(step, before))


def coalesced_collectives(comm: Comm, x: Array, out: Array, step: int) -> int:
    begin(comm, x, out, step)
    small = [np.full(3 + i, step, np.int64) for i in range(3)]
    with comm.coalesce():
        for part in small:
            comm.all_reduce(part)
        comm.all_reduce(x.given, "sum", out.given)
    wrong = sum(int((part != step * comm.size).sum()) for part in small)
    return wrong + wrong_in(comm, out, total_of(step, comm.size))


OPERATIONS: dict[str, Operation] = {
    "all_reduce": all_reduce,
    "in_place": in_place,
    "two_shot": two_shot,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_to_all": all_to_all,
    "messages": messages,
    "blocking_messages": blocking_messages,
    "works": works,
    "coalesced": coalesced,
    "coalesced_collectives": coalesced_collectives,
}
# A receive into a device array can be neither asynchronous nor coalesced.
DEVICE_OPERATIONS = {
    name: call for name, call in OPERATIONS.items() if name not in ("messages", "coalesced")
}
