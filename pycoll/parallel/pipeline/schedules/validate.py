"""Validates a schedule before its first byte: complete, ordered, no deadlock, bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Action, Kind, Schedule
from pycoll.parallel.pipeline.schedules.simulate_pipeline import (
    deadlock,
    done_as,
    peak_live,
    waits_for,
)

_BACKWARD = (Kind.B, Kind.I)


def validate(schedule: Schedule, max_live: Sequence[int] | None = None) -> None:
    """Checks that a schedule can run and computes a whole step.

    Every stage runs F and then B, or I and then W, once for each microbatch, on its own rank; ranks
    do not wait for each other in a cycle; no rank holds more microbatches than allowed.

    Args:
        schedule: A schedule with or without transfers.
        max_live: The most chunks of activations that each rank may hold; None: no limit.

    Raises:
        UsageError: The schedule is invalid; the message names rank, position and action.

    Cost: a few microseconds per action.
    """
    for rank, order in enumerate(schedule.orders):
        _complete(schedule, rank, order)
        _in_order(schedule, rank, order)
    compute = schedule.without(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    _plays(compute)
    for rank, order in enumerate(schedule.orders):
        peak = peak_live(order)
        if max_live is not None and peak > max_live[rank]:
            raise UsageError(
                f"schedule {schedule.name}: rank {rank} holds the activations of {peak} "
                f"microbatches at once, expected at most {max_live[rank]}"
            )


def _complete(schedule: Schedule, rank: int, order: Sequence[Action]) -> None:
    counts: dict[Action, int] = {}
    for action in order:
        counts[action] = counts.get(action, 0) + 1
        known = action.stage < schedule.num_stages
        where = schedule.rank_of(action.stage, action.microbatch) if known else "no rank"
        if where != rank:
            raise UsageError(
                f"schedule {schedule.name}: rank {rank} has {action}, but stage {action.stage} "
                f"is on {where if not known else f'rank {where}'}"
            )
        if counts[action] > 1:
            raise UsageError(f"schedule {schedule.name}: rank {rank} has {action} twice")
        if action.microbatch >= schedule.num_microbatches:
            raise UsageError(
                f"schedule {schedule.name}: rank {rank} has {action}, but there are "
                f"{schedule.num_microbatches} microbatches"
            )
    updates = schedule.updates
    for stage in schedule.stages_of(rank):
        for i in range(schedule.num_microbatches):
            if schedule.rank_of(stage, i) != rank:
                continue
            has = {kind: Action(stage, kind, i) in counts for kind in Kind if kind.is_compute}
            whole, split = has[Kind.B], has[Kind.I] and has[Kind.W]
            wrong = whole and (has[Kind.I] or has[Kind.W])
            updated = updates and schedule.ends_round(stage, i)
            if not has[Kind.F] or not (whole or split) or wrong or has[Kind.U] != updated:
                found = [str(Action(stage, kind, i)) for kind in has if has[kind]]
                wanted = f"{stage}F{i} and {stage}B{i}, or {stage}I{i} and {stage}W{i}"
                raise UsageError(
                    f"schedule {schedule.name}: rank {rank} has {', '.join(found) or 'nothing'} "
                    f"for stage {stage} and microbatch {i}; expected {wanted}"
                    + (f", and {stage}U{i}" if updated else "")
                )


def _in_order(schedule: Schedule, rank: int, order: Sequence[Action]) -> None:
    at = {action: i for i, action in enumerate(order)}
    before = {Kind.B: (Kind.F,), Kind.I: (Kind.F,), Kind.W: (Kind.I,), Kind.U: (Kind.B, Kind.W)}
    updates = dict.fromkeys(range(schedule.num_stages), 0)
    for action in order:
        stage, kind, i = action
        of = schedule.round_of(stage, i) if kind is Kind.U else (i,)
        for earlier in (Action(stage, kind, j) for kind in before.get(kind, ()) for j in of):
            if at.get(earlier, -1) > at[action]:
                raise UsageError(
                    f"schedule {schedule.name}: rank {rank} has {action} before {earlier}"
                )
        updates[stage] += kind is Kind.U
        if kind is Kind.F and schedule.versions and schedule.versions[i] > updates[stage]:
            raise UsageError(
                f"schedule {schedule.name}: rank {rank} has {action} after {updates[stage]} "
                f"updates of the stage, and it uses weights of {schedule.versions[i]}"
            )


def _plays(schedule: Schedule) -> None:
    """Runs each rank until it waits; if no rank can continue, raises a deadlock error."""
    done: set[Action] = set()
    at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                if any(need not in done for need in waits_for(schedule, action)):
                    break
                done.add(done_as(action))
                at[rank] += 1
                moved = True
    if any(position < len(order) for position, order in zip(at, schedule.orders, strict=True)):
        raise UsageError(deadlock(schedule, at, done))


__all__ = ["validate"]
