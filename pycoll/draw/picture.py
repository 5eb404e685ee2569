"""The content of a picture of a schedule, independent of how it is drawn.

Text and figure draw the same `Picture`: per round its flows, and what every rank holds afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Chunks = tuple[int, int]  # first, count
FOREIGN = -1  # a cell whose value contributes nothing to its rank's result, as in an exscan
_NUMBERING = {
    "all_to_all": " (s n + d goes from rank s to rank d)",
    "neighbor_exchange": " (2 s goes from rank s to its left, 2 s + 1 to its right)",
}


class MoveLike(Protocol):
    """One move of a schedule; see csrc/schedule/move.h."""

    round: int
    kind: str
    chunks: Chunks
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Moves of one round that carry the same chunks from one source, or to one destination.

    `shift` is 0 for a flow drawn between its lifelines. A flow that goes around the ring has +1
    when it leaves the picture on the right and enters on the left, -1 the other way.
    """

    kind: str
    chunks: Chunks
    srcs: tuple[int, ...]
    dsts: tuple[int, ...]
    shift: int = 0

    @property
    def first_rank(self) -> int:
        return min(self.srcs + self.dsts)

    @property
    def last_rank(self) -> int:
        return max(self.srcs + self.dsts)

    @property
    def hops(self) -> int:
        """Lifelines from the first rank to the last."""
        return self.last_rank - self.first_rank


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its flows, and how complete each chunk of each rank is afterwards."""

    idx: int
    flows: tuple[Flow, ...]
    bundled: bool  # too many moves for single arrows: draw a rail per flow
    held: tuple[tuple[int, ...], ...]  # [rank][chunk], number of contributions; or FOREIGN
    changed: frozenset[tuple[int, int]]  # (rank, chunk) written in this round


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    caption: str
    num_ranks: int
    num_chunks: int
    full: tuple[tuple[int, ...], ...]  # [rank][chunk], the contributions that complete it
    wanted: tuple[tuple[bool, ...], ...]  # [rank][chunk], whether the rank asks for it at the end
    start: tuple[tuple[int, ...], ...]  # as Round.held, before the first round
    rounds: tuple[Round, ...]

    @property
    def wants_everything(self) -> bool:
        """Whether every rank asks for every chunk, so that nothing needs to be marked."""
        return all(all(row) for row in self.wanted)


def make_picture(schedule: Any, title: str | None = None) -> Picture:
    """Computes the content of a drawing of `schedule`.

    Args:
        schedule: a pycoll.schedule.Schedule.
        title: replaces `ring all_reduce, 8 ranks`.

    Returns:
        The picture, ready to be drawn as text or as a figure.
    """
    n, num_chunks = schedule.n, schedule.num_chunks
    moves_of_round: dict[int, list[MoveLike]] = defaultdict(list)
    for move in schedule.moves:
        moves_of_round[move.round].append(move)

    ring = n > 2 and all((m.dst - m.src) % n in (1, n - 1) for m in schedule.moves)
    contributions = _start_contributions(schedule)
    goals = [[schedule.goal(r, c)[0] for c in range(num_chunks)] for r in range(n)]
    starting = [sum(bool(contributions[r][c]) for r in range(n)) or 1 for c in range(num_chunks)]
    counting = [[-1] * num_chunks for _ in range(n)]  # bit masks of the ranks that count
    if schedule.collective in ("scan", "exscan"):
        own = schedule.collective == "scan"
        counting = [[(1 << (r + own)) - 1] * num_chunks for r in range(n)]
    full = tuple(
        tuple(
            max(1, mask.bit_count()) if mask != -1 else count
            for mask, count in zip(row, starting, strict=True)
        )
        for row in counting
    )
    start = _count(contributions, counting)
    rounds = []
    for idx in sorted(moves_of_round):
        moves = moves_of_round[idx]
        changed = _apply(moves, contributions)
        bundled = len(moves) > 2 * n
        flows = _bundle(moves) if bundled else _arrows(moves, n, ring)
        rounds.append(Round(idx, tuple(flows), bundled, _count(contributions, counting), changed))
    return Picture(
        title=title or f"{schedule.algorithm} {schedule.collective}, {_plural(n, 'rank')}",
        caption=_caption(schedule, len(rounds)),
        num_ranks=n,
        num_chunks=num_chunks,
        full=full,
        wanted=tuple(tuple(goal != "any" for goal in row) for row in goals),
        start=start,
        rounds=tuple(rounds),
    )


def chunk_label(chunks: Chunks) -> str:
    """`3`, or `0-3` for a range."""
    first, count = chunks
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _start_contributions(schedule: Any) -> list[list[int]]:
    """Per rank and chunk, the set of ranks whose values it contains, as a bit mask."""
    return [
        [(1 << r) if schedule.starts_with_value(r, c) else 0 for c in range(schedule.num_chunks)]
        for r in range(schedule.n)
    ]


def _count(
    contributions: list[list[int]], counting: list[list[int]]
) -> tuple[tuple[int, ...], ...]:
    def held(mask: int, counts: int) -> int:
        return (mask & counts).bit_count() or (FOREIGN if mask else 0)

    return tuple(tuple(map(held, *rows)) for rows in zip(contributions, counting, strict=True))


def _apply(moves: Sequence[MoveLike], contributions: list[list[int]]) -> frozenset[tuple[int, int]]:
    """Performs one round in place: every source is read as it was when the round began."""
    before = [list(row) for row in contributions]
    changed = set()
    for move in moves:
        first, count = move.chunks
        for chunk in range(first, first + count):
            value = before[move.src][chunk]
            if move.kind == "reduce":
                contributions[move.dst][chunk] |= value
            else:
                contributions[move.dst][chunk] = value
            changed.add((move.dst, chunk))
    return frozenset(changed)


def _arrows(moves: Sequence[MoveLike], n: int, ring: bool) -> list[Flow]:
    """One flow per move, with those marked that go around the ring."""
    distances = {(m.dst - m.src) % n for m in moves}
    # A cyclic shift by half the ranks is an exchange of pairs, which needs no ring to be read.
    everybody = len({m.src for m in moves}) == n
    cyclic = everybody and len(distances) == 1 and 2 * max(distances) != n
    flows = []
    for m in moves:
        shift = 0
        if ring or cyclic:
            forward = 2 * ((m.dst - m.src) % n) < n
            if forward and m.dst < m.src:
                shift = 1
            elif not forward and m.dst > m.src:
                shift = -1
        flows.append(Flow(m.kind, m.chunks, (m.src,), (m.dst,), shift))
    return flows


def _bundle(moves: Sequence[MoveLike]) -> list[Flow]:
    """Joins moves by source or by destination, whichever gives fewer flows."""
    by_src: dict[tuple, list[int]] = defaultdict(list)
    by_dst: dict[tuple, list[int]] = defaultdict(list)
    for m in moves:
        by_src[m.kind, m.chunks, m.src].append(m.dst)
        by_dst[m.kind, m.chunks, m.dst].append(m.src)
    if len(by_src) <= len(by_dst):
        flows = [Flow(k, c, (r,), tuple(sorted(d))) for (k, c, r), d in by_src.items()]
        return sorted(flows, key=lambda f: (f.srcs, f.chunks))
    flows = [Flow(k, c, tuple(sorted(s)), (r,)) for (k, c, r), s in by_dst.items()]
    return sorted(flows, key=lambda f: (f.dsts, f.chunks))


def _caption(schedule: Any, num_rounds: int) -> str:
    sent = [0] * schedule.n
    for move in schedule.moves:
        sent[move.src] += move.chunks[1]
    least, most = (count / schedule.chunks_per_message for count in (min(sent), max(sent)))
    return ", ".join(
        (
            _plural(num_rounds, "round"),
            _plural(schedule.num_chunks, "chunk") + _NUMBERING.get(schedule.collective, ""),
            f"sent per rank: {_span(least, most)} x the message",
            f"longest program after lowering: {_plural(schedule.num_steps, 'step')}",
        )
    )


def _span(least: float, most: float) -> str:
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
