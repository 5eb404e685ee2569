"""Checks of Python arguments: a bad one raises UsageError with its name and a short text."""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

from pycoll.errors import UsageError

_NAME_BYTES = 128  # longer than any name
_SHOWN_CHARS = 80


def shown(value: Any) -> str:
    """The value as error messages show it: shortened, without control characters."""
    try:
        found = reprlib.repr(value)
    except Exception:  # of the value's own methods
        found = f"a {type(value).__name__}"
    printable = "".join(each if " " <= each <= "~" else ascii(each)[1:-1] for each in found)
    return printable if len(printable) <= _SHOWN_CHARS else printable[:_SHOWN_CHARS] + "..."


def flag(value: Any, name: str) -> bool:
    """Returns the value's truth.

    Raises:
        UsageError: It has none, as an array of several elements.
    """
    try:
        return bool(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {shown(value)}, expected True or False") from None


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """Returns the value as an int.

    Raises:
        UsageError: It is no whole number from `least` to `most`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise UsageError(
            f"{name} is {shown(value)}, expected a whole number from {least} to {most}"
        )
    return number


def real_number(value: Any, name: str) -> float:
    """Returns the value as a float.

    Raises:
        UsageError: It is no finite number of 0 or more.
    """
    number = _number(value)
    if not 0 <= number < math.inf:
        raise UsageError(f"{name} is {shown(value)}, expected a number of 0 or more")
    return number


def seconds(value: Any, name: str = "timeout_s") -> float:
    """Returns the value as a number of seconds above 0, which may be infinite.

    Raises:
        UsageError: It is no such number.
    """
    number = _number(value)
    if not number > 0:
        raise UsageError(f"{name} is {shown(value)}, expected a number of seconds above 0")
    return number


def wait_seconds(value: Any, name: str = "timeout_s") -> float:
    """Like `seconds`, for a wait that may be 0: 0 and negative numbers do not wait.

    Raises:
        UsageError: It is no number.
    """
    number = _number(value)
    if math.isnan(number):
        raise UsageError(f"{name} is {shown(value)}, expected a number of seconds")
    return number


def text(value: Any, name: str, most_bytes: float = math.inf) -> str:
    """Returns the value, a text that the core can read.

    Raises:
        UsageError: It is no str, is longer than `most_bytes`, or UTF-8 cannot encode it.
    """
    try:
        num_bytes = len(str.encode(value))
    except (TypeError, UnicodeEncodeError):
        raise UsageError(
            f"{name} is {shown(value)}, expected a str that UTF-8 can encode"
        ) from None
    if num_bytes > most_bytes:
        raise UsageError(f"{name} is a str of {num_bytes} bytes, expected at most {most_bytes}")
    return str(value)


def short_name(value: Any, name: str) -> str:
    """Like `text`, for a name, which error messages repeat."""
    return text(value, name, _NAME_BYTES)


def _number(value: Any) -> float:
    """The value as a float; NaN if it is no number."""
    if isinstance(value, (str, bytes, bytearray)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


__all__ = [
    "flag",
    "real_number",
    "seconds",
    "short_name",
    "shown",
    "text",
    "wait_seconds",
    "whole_number",
]
