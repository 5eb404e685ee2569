"""GPipe: all forwards, then all backwards; with several stages per rank, breadth first."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import (
    Action,
    Costs,
    Kind,
    Schedule,
    interleaved_placement,
)
from pycoll.parallel.pipeline.schedules.registry import Generator


def make(p: int, m: int, v: int, name: str = "gpipe") -> Schedule:
    """Cost: bubble (p - 1) / (m v) of the busy time; live m v: every microbatch.

    Source: Huang et al., GPipe, 2019; breadth first: Lamy-Poirier, 2022.
    """
    orders = []
    for rank in range(p):
        stages = [rank + p * chunk for chunk in range(v)]
        forwards = [Action(stage, Kind.F, i) for stage in stages for i in range(m)]
        # torch's GPipe runs backward in microbatch order, its breadth-first schedule in reverse.
        back = range(m) if name == "gpipe" else range(m - 1, -1, -1)
        backwards = [Action(stage, Kind.B, i) for stage in reversed(stages) for i in back]
        orders.append((*forwards, *backwards))
    return Schedule(name, m, interleaved_placement(p, v), tuple(orders))


def make_looped(p: int, m: int, v: int) -> Schedule:
    return make(p, m, v, "looped_bfs")


def bubble(p: int, m: int, v: int, costs: Costs) -> float:
    if m >= p:
        return (p - 1) / (m * v)
    # A rank waits for each microbatch to come around, as in GPipe on p v ranks.
    return (p * v + m - 1) / (m * v) - 1


def live(p: int, m: int, v: int, rank: int) -> int:
    return m * v


ROWS = (
    Generator(
        name="gpipe",
        make=make,
        bubble=bubble,
        live=live,
        summary="all forwards, then all backwards",
        source="Huang et al., GPipe, arXiv 1811.06965",
        torch_name="GPipe",
        allowed_stages=(1,),
    ),
    Generator(
        name="looped_bfs",
        make=make_looped,
        bubble=bubble,
        live=live,
        summary="GPipe with several stages per rank, breadth first",
        source="Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953",
        torch_name="LoopedBFS",
        default_stages=2,
    ),
)
