"""Patterns of names, as users write them: fnmatch, with `|` between alternatives."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from pycoll.errors import UsageError


def names_matching(patterns: str, names: Collection[str], where: str, what: str) -> list[str]:
    """The names that a pattern matches, in order of its alternatives.

    Args:
        patterns: The pattern.
        names: All names.
        where: Which setting has the pattern, for the error message, such as "tp plan".
        what: What the names are, such as "layer of GPT".

    Raises:
        UsageError: An alternative matches no name; lists similar ones.
    """
    found: list[str] = []
    for pattern in patterns.split("|"):
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = ", ".join(_near(pattern, list(names))) or "none"
            raise UsageError(f"{where}: {pattern!r} matches no {what}; near names are {near}")
        found += matched
    return found


def _near(pattern: str, names: list[str]) -> list[str]:
    """Names whose last part resembles the pattern's, then names that resemble it as a whole."""
    lasts: dict[str, str] = {}
    for name in names:
        lasts.setdefault(name.rpartition(".")[2], name)
    last = pattern.rpartition(".")[2]
    near = [lasts[key] for key in difflib.get_close_matches(last, lasts, n=4, cutoff=0.4)]
    near += difflib.get_close_matches(pattern, names, n=4, cutoff=0.4)
    return list(dict.fromkeys(near))[:4]


__all__ = ["names_matching"]
