"""PipeDream: 1F1B without a flush. Every microbatch updates the weights; versions are stashed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from pycoll.errors import UsageError
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
    return stream("pipedream", p, m)


def stream(
    name: str, p: int, m: int, per_update: int = 1, versions: Sequence[int] = ()
) -> Schedule:
    """1F1B without a flush, with an update of a stage after every few of its microbatches.

    Args:
        name: Name of the schedule.
        p: Number of ranks.
        m: Number of microbatches.
        per_update: Number of microbatches of an update; the last one may have fewer.
        versions: The number of updates in the weights that each microbatch uses; empty: the newest
            ones at its forward.
    """
    orders = []
    for rank in range(p):
        order: list[Action] = []
        for action in in_turn(*sequences(p, m, 1, rank), p - 1 - rank):
            order.append(action)
            number = action.microbatch + 1
            if action.kind is Kind.B and (number % per_update == 0 or number == m):
                order.append(Action(action.stage, Kind.U, action.microbatch))
        orders.append(tuple(order))
    placement = interleaved_placement(p, 1)
    return Schedule(name, m, placement, tuple(orders), (), per_update, tuple(versions))


def round_robin(replicas: Sequence[int], m: int) -> Schedule:
    """Stages with several ranks each, which take turns at the microbatches: 1F1B-RR.

    Each turn of a stage is one update, by the mean of its replicas' gradients, for which they wait.

    Args:
        replicas: Number of ranks of each stage, from the first one on.
        m: Number of microbatches, a multiple of each of them.

    Raises:
        UsageError: A number is below 1, or does not divide the microbatches.

    Cost: the first stage has NOAM microbatches in flight on each of its ranks: the number of
        ranks over that of the first stage, rounded up.
    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2.
    """
    if not replicas or min(replicas) < 1 or any(m % number for number in replicas):
        raise UsageError(
            f"pipedream: {m} microbatches and replicas {tuple(replicas)}: expected numbers of "
            f"ranks that divide the microbatches, so that all replicas take part in each update"
        )
    orders = []
    for stage, number in enumerate(replicas):
        for replica in range(number):
            own = range(replica, m, number)
            order: list[Action] = []
            forwards = [Action(stage, Kind.F, i) for i in own]
            backwards = [Action(stage, Kind.B, i) for i in own]
            for action in in_turn(forwards, backwards, staleness_of(replicas, stage)):
                order.append(action)
                if action.kind is Kind.B:
                    order.append(Action(action.stage, Kind.U, action.microbatch))
            orders.append(tuple(order))
    placement = (0, *accumulate(replicas[:-1]))
    return Schedule("pipedream", m, placement, tuple(orders), tuple(replicas))


def staleness_of(replicas: Sequence[int], stage: int) -> int:
    """The most updates of a stage between the forward of a microbatch and its backward."""
    return math.ceil(sum(replicas[stage:]) / replicas[stage]) - 1


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
        staleness=staleness,
    ),
)
