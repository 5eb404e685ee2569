"""Checks of Python arguments: a bad one raises UsageError with its name and a short text."""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

from pycoll.errors import UsageError


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
        text = reprlib.repr(value)
        raise UsageError(f"{name} is {text}, expected a whole number from {least} to {most}")
    return number


def seconds(value: Any, name: str = "timeout_s") -> float:
    """Returns the value as a number of seconds above 0, which may be infinite.

    Raises:
        UsageError: It is no such number.
    """
    number = _number(value)
    if not number > 0:
        text = reprlib.repr(value)
        raise UsageError(f"{name} is {text}, expected a number of seconds above 0")
    return number


def wait_seconds(value: Any, name: str = "timeout_s") -> float:
    """Like `seconds`, for a wait that may be 0: 0 and negative numbers do not wait.

    Raises:
        UsageError: It is no number.
    """
    number = _number(value)
    if math.isnan(number):
        text = reprlib.repr(value)
        raise UsageError(f"{name} is {text}, expected a number of seconds")
    return number


def text(value: Any, name: str) -> str:
    """Returns the value, a text that the core can read.

    Raises:
        UsageError: It is no str, or UTF-8 cannot encode it.
    """
    try:
        str.encode(value)
    except (TypeError, UnicodeEncodeError):
        shown = reprlib.repr(value)
        raise UsageError(f"{name} is {shown}, expected a str that UTF-8 can encode") from None
    return str(value)


def _number(value: Any) -> float:
    """The value as a float; NaN if it is no number."""
    if isinstance(value, (str, bytes, bytearray)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


__all__ = ["seconds", "text", "wait_seconds", "whole_number"]
