"""A rank that gives up keeps its arrays, and late ranks get no wrong result."""

from __future__ import annotations

import contextlib
import time

import pytest
from late_arrays import ARRAYS
from worlds import on_ranks

import pycoll

COUNT = 3 << 20
RESTORED = 777  # what the caller writes once it has the error


def give_up(comm, name, arrays, after_s):
    """The ranks whose part is done only wait for the others' copies: they close meanwhile."""
    part = comm.split(0)
    x, out = (ARRAYS[arrays](part, COUNT).given for _ in range(2))
    out_of_root = out if part.rank == 0 else None
    calls = {
        "broadcast": lambda **how: part.broadcast(x, 0, **how),
        "reduce": lambda **how: part.reduce(x, 0, "sum", out_of_root, **how),
    }
    call = calls[name]
    for _ in range(10):
        call()
    x[:] = 1
    copies = (part.rank == 0) == (name == "reduce")
    comm.barrier()
    returned = False
    if copies:
        with contextlib.suppress(pycoll.Error):
            call()
            returned = True
    else:
        work = call(async_op=True)
        time.sleep(after_s)
        part.close()
        with contextlib.suppress(pycoll.Error):
            work.wait()
            returned = True
    expected_x, expected_out = (1, comm.size) if returned else (RESTORED, RESTORED)
    if not returned:
        x[:] = out[:] = RESTORED
    comm.barrier()
    assert (x == expected_x).all(), f"x, {name} {'returned' if returned else 'raised'}"
    if not returned or (copies and name == "reduce"):
        assert (out == expected_out).all(), f"out, {name} {'returned' if returned else 'raised'}"
    part.close()


@pytest.mark.parametrize("arrays", ["plain", "adopted", "registered", "heap"])
@on_ranks(3)
def test_rank_that_gives_up_keeps_its_arrays_and_the_others_get_no_wrong_result(comm, arrays):
    """Seconds: the copies must be long enough to be interrupted."""
    for i in range(3):
        give_up(comm, "broadcast", arrays, 0.001 * i)
        give_up(comm, "reduce", arrays, 0.001 * i)
