"""Naive model parallelism: one microbatch at a time runs through all stages and back."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import (
    Action,
    Costs,
    Kind,
    Schedule,
    interleaved_placement,
)
from pycoll.parallel.pipeline.schedules.registry import Generator


def make(p: int, m: int, v: int) -> Schedule:
    """Cost: bubble p - 1 of the busy time; live v."""
    orders = []
    for rank in range(p):
        stages = [rank + p * chunk for chunk in range(v)]
        order: list[Action] = []
        for i in range(m):
            order += (Action(stage, Kind.F, i) for stage in stages)
            order += (Action(stage, Kind.B, i) for stage in reversed(stages))
        orders.append(tuple(order))
    return Schedule("naive", m, interleaved_placement(p, v), tuple(orders))


def bubble(p: int, m: int, v: int, costs: Costs) -> float:
    return p - 1.0


def live(p: int, m: int, v: int, rank: int) -> int:
    return v


ROWS = (
    Generator(
        name="naive",
        make=make,
        bubble=bubble,
        live=live,
        summary="one microbatch at a time: one rank of p is busy",
        source="model parallelism without a pipeline",
    ),
)
