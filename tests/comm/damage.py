"""Damage to memory that ranks share, as faulty memory does it."""

from __future__ import annotations

import time

MAX_BYTES = 1 << 28  # more are only addresses, of the heap for registered arrays


def damage_shared(pattern: bytes) -> int:
    """Flips one bit of each occurrence of `pattern` in memory that this process shares."""
    found = 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "r+b", 0) as memory:
        for line in maps:
            place, permissions, *_ = line.split()
            if permissions != "rw-s":
                continue
            begin, end = (int(x, 16) for x in place.split("-"))
            if end - begin > MAX_BYTES:
                continue
            memory.seek(begin)
            data = memory.read(end - begin)
            at = data.find(pattern)
            while at >= 0:
                memory.seek(begin + at + len(pattern) // 2)
                memory.write(bytes([data[at + len(pattern) // 2] ^ 4]))
                found += 1
                at = data.find(pattern, at + len(pattern))
    return found


def damage_once_there(pattern: bytes, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while damage_shared(pattern) == 0:
        assert time.monotonic() < end, "the bytes did not come"
        time.sleep(0.01)
