"""Parses and formats sizes, times, rates and ranges."""

from __future__ import annotations

import re

from pycoll.errors import UsageError

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1e0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)"


def parse_nbytes(text: str) -> int:
    """Parses `4`, `64K` or `1.5MiB`: bytes, with units of 1024 as in nccl-tests."""
    match = re.fullmatch(_NUMBER + r"\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size: expected bytes such as 4, 64K or 16M")
    return int(float(match[1]) * _BINARY[match[2].upper()])


def parse_seconds(text: str) -> float:
    """`1us`, `0.5 ms`, `1e-6`: seconds."""
    match = re.fullmatch(_NUMBER + r"\s*(s|ms|us|ns)?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a time: expected a number with s, ms, us or ns")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def parse_seconds_per_byte(text: str) -> float:
    """Parses `10GB/s` (units of 1000), `8GiB/s` (1024) or `1e-10s/byte`: seconds per byte."""
    rate = re.fullmatch(_NUMBER + r"\s*([KMGT]?)(i?)B/s", text.strip(), re.IGNORECASE)
    if rate is not None:
        factor = (_BINARY if rate[3] else _DECIMAL)[rate[2].upper()]
        bytes_per_second = float(rate[1]) * factor
        return 1 / bytes_per_second if bytes_per_second > 0 else 0.0
    per_byte = re.fullmatch(_NUMBER + r"\s*(s|ms|us|ns)?(/byte|/B)?", text.strip())
    if per_byte is not None:
        return float(per_byte[1]) * _SECONDS[per_byte[2] or "s"]
    raise UsageError(f"{text!r} is not a rate: expected for example 10GB/s or 1e-10s/byte")


def parse_integers(text: str, what: str) -> list[int]:
    """Parses `4`, `2,4,8`, `1:17` (both ends included) and mixtures: ascending integers >= 1."""
    values: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(
                f"{text!r} is not a list of {what}: expected for example 8, 2,4,8 or 1:17"
            )
        values.update(range(first, last + 1))
    return sorted(values)


def parse_sizes(text: str) -> list[int]:
    """Parses `1M`, `4,1K`, `4:64M` (doubling) and `4:64M:4` (times 4): sizes in bytes."""
    sizes: list[int] = []
    for part in text.split(","):
        ends = part.split(":")
        if len(ends) > 3:
            raise UsageError(
                f"{text!r} is not a list of sizes: expected for example 4:64M or 4:64M:4"
            )
        first, last = parse_nbytes(ends[0]), parse_nbytes(ends[min(1, len(ends) - 1)])
        factor = int(ends[2]) if len(ends) == 3 and ends[2].isdigit() else 2
        if not 0 < first <= last or factor < 2:
            raise UsageError(f"{part!r} is not a range of sizes: expected FIRST:LAST[:FACTOR]")
        while first <= last:
            sizes.append(first)
            first *= factor
    return sizes


def format_nbytes(nbytes: float) -> str:
    """`512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.4g} {unit}"


def format_seconds(time_s: float) -> str:
    """`12.3 us`."""
    for unit, seconds in _SECONDS.items():
        if time_s >= seconds:
            return f"{time_s / seconds:.4g} {unit}"
    return f"{time_s / 1e-9:.4g} ns"


def format_rate(bytes_per_second: float) -> str:
    """Formats a rate as `3.21 GB/s`, in units of 1000, as usual for networks and memory."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if bytes_per_second < 1000 or unit == "GB/s":
            break
        bytes_per_second /= 1000
    return f"{bytes_per_second:.3g} {unit}"
