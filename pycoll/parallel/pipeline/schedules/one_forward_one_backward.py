"""1F1B with a flush; with several stages per rank it is interleaved."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import (
    Action,
    Costs,
    Kind,
    Schedule,
    interleaved_placement,
)
from pycoll.parallel.pipeline.schedules.order import in_turn, rounds
from pycoll.parallel.pipeline.schedules.registry import Generator


def sequences(p: int, m: int, v: int, rank: int) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of a rank, each in order: round by round, depth first."""
    forwards, backwards = [], []
    for group in rounds(m, p):
        for chunk in range(v):
            forwards += [Action(rank + p * chunk, Kind.F, i) for i in group]
        for chunk in reversed(range(v)):
            backwards += [Action(rank + p * chunk, Kind.B, i) for i in group]
    return forwards, backwards


def make_1f1b(p: int, m: int, v: int) -> Schedule:
    """Cost: bubble (p - 1) / m of the busy time; live min(m, p - rank).

    Source: Narayanan et al., PipeDream-flush in arXiv 2006.09503.
    """
    orders = tuple(in_turn(*sequences(p, m, 1, rank), p - 1 - rank) for rank in range(p))
    return Schedule("1f1b", m, interleaved_placement(p, 1), orders)


def make_interleaved(p: int, m: int, v: int) -> Schedule:
    """Cost: bubble (p - 1) / (m v) of the busy time, v times the transfers.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.
    """
    size = len(rounds(m, p)[0])
    orders = tuple(
        in_turn(*sequences(p, m, v, rank), (v - 1) * size + 2 * (p - 1 - rank)) for rank in range(p)
    )
    return Schedule("interleaved_1f1b", m, interleaved_placement(p, v), orders)


def bubble(p: int, m: int, v: int, costs: Costs) -> float:
    if m >= p:
        return (p - 1) / (m * v)
    return (p * v + m - 1) / (m * v) - 1


def live_1f1b(p: int, m: int, v: int, rank: int) -> int:
    return min(m, p - rank)


def live_interleaved(p: int, m: int, v: int, rank: int) -> int:
    size = len(rounds(m, p)[0])
    return min(m * v, 2 * (p - rank - 1) + (v - 1) * size + 1)


ROWS = (
    Generator(
        name="1f1b",
        make=make_1f1b,
        bubble=bubble,
        live=live_1f1b,
        summary="one forward and one backward in turn: GPipe's bubble, p microbatches of memory",
        source="Narayanan et al., Memory-Efficient Pipeline-Parallel Training, arXiv 2006.09503",
        torch_name="1F1B",
        allowed_stages=(1,),
    ),
    Generator(
        name="interleaved_1f1b",
        make=make_interleaved,
        bubble=bubble,
        live=live_interleaved,
        summary="1F1B with v stages per rank: 1/v of the bubble, v times the transfers",
        source="Narayanan et al., Efficient Large-Scale Training on Clusters, arXiv 2104.04473",
        torch_name="Interleaved1F1B",
        default_stages=2,
    ),
)
