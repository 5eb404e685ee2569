"""Inputs, oracles, sizes at the edges of tiles, and checks that tests of communicators share."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll import _core, schedule

PROTOCOLS = ("ll", "simple")
OPS = ("sum", "prod", "min", "max", "avg")
both = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


def builtin_algorithms(collective: str) -> list[str]:
    """The rows of the core's table: other tests may have registered more in Python."""
    return [row.name for row in _core.algorithms() if row.collective == collective]


def inputs(n: int, count: int, dtype: object = np.float32, *, seed: int = 0) -> np.ndarray:
    """The values of all ranks, shape (n, count), identical on every rank."""
    rng = np.random.default_rng([seed, n])
    if np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return rng.integers(low, high, (n, count), dtype, endpoint=True)
    return rng.uniform(-1, 1, (n, count)).astype(dtype)


def check_refused(cases: dict[str, tuple[Callable[..., Any], str]], *args: Any) -> None:
    """Every case's call raises a UsageError whose text matches the case's pattern."""
    wrong = []
    for name, (call, pattern) in cases.items():
        try:
            call(*args)
        except pycoll.UsageError as error:
            if not re.search(pattern, str(error)):
                wrong.append(f"{name}: {str(error)!r} does not match {pattern!r}")
        else:
            wrong.append(f"{name}: no error, expected {pattern!r}")
    assert not wrong, "\n".join(wrong)


def crc(x: np.ndarray) -> int:
    return zlib.crc32(x.tobytes())


@functools.cache
def slot_payload_bytes(protocol: str) -> int:
    """Bytes that one slot carries, found from outside: one byte more takes one more message."""

    def search(comm: pycoll.Communicator) -> int:
        def num_messages(nbytes: int) -> int:
            before = comm.ledger["sent_messages"]
            comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm=f"one_shot/{protocol}")
            return comm.ledger["sent_messages"] - before

        fits, too_many = 1, 1 << 24
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if num_messages(middle) == num_messages(1):
                fits = middle
            else:
                too_many = middle
        return fits

    found = pycoll.run_ranks(search, 2, threads=True)
    assert found[0] == found[1] > 64
    return found[0]


def tile_count(algorithm: str, n: int, itemsize: int, payload_bytes: int) -> int:
    """Elements of one tile: the longest range of chunks of any step fills a slot."""
    built = schedule.build("all_reduce", algorithm, n)
    longest = max((step.num_chunks for p in built.programs() for step in p.steps), default=1)
    return payload_bytes // itemsize // longest * built.num_chunks
