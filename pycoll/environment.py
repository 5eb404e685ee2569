"""The environment variables of pycoll: one table (csrc/base/environment.h), read strictly."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pycoll import _core


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the table.

    Attributes:
        name: Name, such as PYCOLL_ALGO.
        expected: Valid values, such as "0 or 1".
        default: Value that applies when the variable is not set.
        help: Description in one sentence.
        value: Value in this process; empty when the variable is not set.
    """

    name: str
    expected: str
    default: str
    help: str
    value: str


def table() -> list[Variable]:
    """All rows, in the order of the table, with the values of this process."""
    rows = _core.bootstrap.environment_table()
    return [Variable(**row, value=os.environ.get(row["name"], "")) for row in rows]


def read(name: str) -> str:
    """Returns the value of a variable of the table; empty when it is not set.

    Raises:
        UsageError: The value is invalid, or the table has no such variable.
    """
    return _core.bootstrap.read_environment(name)


def unknown() -> list[str]:
    """Variables of this process that begin with PYCOLL_ and are not in the table."""
    known = {row["name"] for row in _core.bootstrap.environment_table()}
    return sorted(name for name in os.environ if name.startswith("PYCOLL_") and name not in known)
