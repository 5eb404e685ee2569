"""Shares of any number of samples from the traces of two: costs grow evenly with the samples.

Operations, bytes and payloads of an operator are a constant and a part for each sample. A trace of
one sample is no basis: with dimensions of length 1 torch copies less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pycoll.parallel.planner.pieces import Share
from pycoll.parallel.planner.trace import Operator, Sent

_LEAST = 2  # samples of a trace that others are made from


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut, but for the number of samples.

    Attributes:
        tp, cp, ep: Sizes of the axes that share out layers.
        sequence_parallel, recompute: As in `Layout`.
    """

    tp: int
    cp: int
    ep: int
    sequence_parallel: bool
    recompute: str | None

    @property
    def kind(self) -> Hashable:
        """What decides which code runs: whether each axis has several ranks, and the options."""
        return self.tp > 1, self.cp > 1, self.ep > 1, self.sequence_parallel, self.recompute


class Sizes:
    """Shares by cut and number of samples, traced as rarely as possible.

    Invariant: for each kind of cut one made share has been compared with its trace; if they
    differed, all shares of that kind are traced.
    """

    def __init__(self) -> None:
        self._traced: dict[Cut, dict[int, Share]] = {}
        self._is_even: dict[Hashable, bool] = {}

    def share(self, cut: Cut, size: int, trace: Callable[[], Share]) -> Share:
        """The share of a number of samples.

        Args:
            cut: How the model is cut.
            size: The number of samples.
            trace: Traces it.

        Returns:
            The share.

        Cost: that of `trace`; milliseconds if two other sizes of the cut have been traced.
        """
        traced = self._traced.setdefault(cut, {})
        is_even = self._is_even.get(cut.kind)
        two = _two(traced, size) if is_even is not False else None
        made = between(traced, two, size) if two else None
        if made is not None and is_even:
            return made
        traced[size] = trace()
        if made is not None:
            self._is_even[cut.kind] = made == traced[size]
        return traced[size]

    def expected(self, asked: Iterable[tuple[Cut, int]]) -> Iterator[tuple[Cut, int]]:
        """Yields those of the shares asked for that will be traced, if costs turn out to be even.

        Args:
            asked: Cuts and numbers of samples, in the order of the calls of `share`.
        """
        traced = {cut: set(of) for cut, of in self._traced.items()}
        is_even = dict(self._is_even)
        for cut, size in asked:
            known = traced.setdefault(cut, set())
            two = _two(known, size) if is_even.get(cut.kind) is not False else None
            if size in known or (two and is_even.get(cut.kind)):
                continue
            yield cut, size
            known.add(size)
            if two:
                is_even[cut.kind] = True


def _two(traced: Iterable[int], size: int) -> tuple[int, int] | None:
    """The traced numbers of samples from which the share of another number can be made."""
    known = [of for of in sorted(traced) if of >= _LEAST]
    return (known[0], known[-1]) if size >= _LEAST and len(known) > 1 else None


def between(traced: Mapping[int, Share], two: tuple[int, int], size: int) -> Share | None:
    """The share of a number of samples on the line through those of two others.

    Args:
        traced: Shares by number of samples.
        two: The two numbers.
        size: The number of samples.

    Returns:
        The share; None if the two have other operators, or a count would not be whole.
    """
    a, b = two
    low, high = traced[a], traced[b]

    def line(x: int, y: int) -> int:
        rise, rest = divmod((y - x) * (size - a), b - a)
        if rest or x + rise < 0:
            raise _NoLine
        return x + rise

    made: dict[tuple[int, int], Any] = {}  # events of equal steps are one object

    def event(x: Operator | Sent, y: Operator | Sent) -> Operator | Sent:
        key = id(x), id(y)
        if key not in made:
            if _what(x) != _what(y):
                raise _NoLine
            made[key] = replace(x, nbytes=line(x.nbytes, y.nbytes))
            if isinstance(x, Operator) and isinstance(y, Operator):
                made[key] = replace(made[key], flops=line(x.flops, y.flops))
        return made[key]  # type: ignore[no-any-return]

    try:
        return Share(
            {
                key: [event(x, y) for x, y in zip(events, high.events[key], strict=True)]
                for key, events in low.events.items()
            },
            {key: line(kept, high.kept[key]) for key, kept in low.kept.items()},
            low.lasting,
            line(low.hidden, high.hidden),
        )
    except (_NoLine, KeyError, ValueError):
        return None


class _NoLine(Exception):
    """Two traces differ in more than their amounts."""


def _what(of: Operator | Sent) -> tuple[Hashable, ...]:
    """An event without its amounts."""
    if isinstance(of, Operator):
        return of.name, of.layers, of.part
    return of.axis, of.collective, of.layers, of.part


__all__ = ["Cut", "Sizes", "between"]
