"""Many cases in one test: all of them run, and each that fails is reported by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pycoll import _core

MAX_REPORTED = 8

INFO = {row.name: row for row in _core.collectives()}  # the core's table of collectives


def each_case(names: str, cases: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Calls the test for each case, as pytest.mark.parametrize does, but as one test.

    Args:
        names: Parameters of the test, separated by commas.
        cases: The values: a tuple for each case where there are several parameters.
    """
    parameters = names.replace(" ", "").split(",")
    rows = [case if len(parameters) > 1 else (case,) for case in cases]
    given = [dict(zip(parameters, row, strict=True)) for row in rows]

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failures = []
            for values in given:
                try:
                    test(**fixtures, **values)
                except (Exception, pytest.fail.Exception) as error:
                    case = ", ".join(f"{name}={value!r:.200}" for name, value in values.items())
                    failures.append((case, error))
            if failures:
                told = [f"{case}: {error!s:.1000}" for case, error in failures[:MAX_REPORTED]]
                raise AssertionError(
                    "\n".join([f"{len(failures)} of {len(given)} cases failed:", *told])
                ) from failures[0][1]

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in parameters]
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate


def in_turn(*works: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A function for one world of ranks: calls each of these with the rank's communicator."""

    def work(comm: Any) -> None:
        for each in works:
            each(comm)
            comm.barrier()

    return work
