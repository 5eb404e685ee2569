"""PipeDream: 1F1B without a flush. Every microbatch updates the weights; versions are stashed."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import (
    Action,
    Costs,
    Kind,
    Schedule,
    interleaved_placement,
)
from pycoll.parallel.pipeline.schedules.one_forward_one_backward import live_1f1b, sequences
from pycoll.parallel.pipeline.schedules.order import in_turn
from pycoll.parallel.pipeline.schedules.registry import Generator


def make(p: int, m: int, v: int) -> Schedule:
    """Each backward is followed by an update; the microbatches of many steps form one stream.

    Cost: no bubble between the first and the last backward; live min(m, p - rank), and as many
    versions of the weights.
    Source: Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3.
    """
    orders = []
    for rank in range(p):
        order: list[Action] = []
        for action in in_turn(*sequences(p, m, 1, rank), p - 1 - rank):
            order.append(action)
            if action.kind is Kind.B:
                order.append(Action(action.stage, Kind.U, action.microbatch))
        orders.append(tuple(order))
    return Schedule("pipedream", m, interleaved_placement(p, 1), tuple(orders))


def staleness(p: int, stage: int, microbatch: int) -> int:
    """Updates of a stage between the forward of a microbatch and its backward."""
    return min(microbatch, p - 1 - stage)


def bubble(p: int, m: int, v: int, costs: Costs) -> float:
    """The bubble of a whole stream, from its start-up and its end; in between there is none."""
    return (p - 1) / m


ROWS = (
    Generator(
        name="pipedream",
        make=make,
        bubble=bubble,
        live=live_1f1b,
        summary="no flush: weights are updated at every backward, p - 1 - stage updates stale",
        source="Narayanan et al., PipeDream, SOSP 2019, arXiv 1806.03377",
        allowed_stages=(1,),
    ),
)
