"""A move: one event of a collective, with both of its ends; see csrc/schedule/move.h."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Move", "copy", "reduce"]


@dataclass(frozen=True, slots=True)
class Move:
    """One event of a collective, with both of its ends.

    All moves of one round are simultaneous: every source is read as it was when the round began.

    Args:
        round: when, counted from 0.
        kind: `copy` replaces dst's chunks, `reduce` combines them with src's.
        chunks: (first, count); the same chunks at both ends.
        src: rank that is read.
        dst: rank that is written.
    """

    round: int
    kind: str
    chunks: tuple[int, int]
    src: int
    dst: int


def copy(round: int, chunks: int | tuple[int, int], src: int, dst: int) -> Move:
    """A move that replaces dst's chunks by src's.

    Args:
        round: when, counted from 0.
        chunks: one chunk, or (first, count).
        src: rank that is read.
        dst: rank that is written.

    Returns:
        The move.
    """
    return Move(round, "copy", (chunks, 1) if isinstance(chunks, int) else chunks, src, dst)


def reduce(round: int, chunks: int | tuple[int, int], src: int, dst: int) -> Move:
    """A move that combines src's chunks into dst's; arguments as in copy()."""
    return Move(round, "reduce", (chunks, 1) if isinstance(chunks, int) else chunks, src, dst)
