"""Kinds of faults that tests/fuzz/campaign.py injects, one module each.

A module has a docstring, whose first line `--list` prints, and:

    CASES                       cases of a whole campaign
    FEW                         seeds that CI runs
    run_case(seed) -> Outcome   one case, a function of its seed alone
    why_not() -> str            optional: why this machine cannot run the cases, or ""

A case starts its own ranks, ends them, and compares every value that a call returned with the right
one, on late ranks, too. `campaign.py KIND --seed S --cases 1` runs the case of seed S again.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast


@dataclass(frozen=True)
class Outcome:
    complaint: str = ""  # what is wrong; empty: nothing
    # Seconds from the fault to each waiting rank's error; empty where nothing is timed.
    notices_s: tuple[float, ...] = ()
    label: str = ""  # the cases of a campaign are also counted by label
    amount: int = 0  # what the case has injected (frames), where a case injects many


class Kind(Protocol):
    __doc__: str
    CASES: int
    FEW: Sequence[int]
    run_case: Callable[[int], Outcome]


def why_not(kind: Kind) -> str:
    """Why this machine cannot run the kind's cases; empty if it can."""
    text: str = getattr(kind, "why_not", str)()
    return text


def add_test_folders() -> None:
    """Makes the oracles, jobs, networks and worlds of other folders of tests importable."""
    tests = Path(__file__).parents[2]
    folders = ("", "comm", "hosts", "parallel", "bootstrap", "torch")
    sys.path[:0] = [str(tests / folder) for folder in folders]


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Kind:
    return cast(Kind, importlib.import_module(f"injections.{name}"))
