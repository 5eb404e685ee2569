"""Adds transfers to a schedule: immediate sends, and receives posted ahead.

Posting a send or receive never blocks; only compute waits for its input. So transfers cannot
deadlock where compute does not.
"""

from __future__ import annotations

from dataclasses import replace

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Action, Kind, Schedule
from pycoll.parallel.pipeline.schedules.simulate_pipeline import needs

PREFETCH = 2


def with_transfers(schedule: Schedule, prefetch: int = PREFETCH) -> Schedule:
    """Returns a schedule with SEND and RECV where data crosses ranks.

    A RECV marks the posting of a receive, `prefetch` actions before the action that reads it and
    waits for it. Each rank has at most `prefetch` posted receives that are not read yet, which
    bounds their memory.

    Args:
        schedule: A schedule with compute actions only.
        prefetch: Number of actions by which receives are posted ahead, 1 or more.

    Returns:
        The same compute actions, with transfers in between.
    """
    orders = tuple(_rank(schedule, order, max(1, prefetch)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def _rank(schedule: Schedule, order: tuple[Action, ...], prefetch: int) -> tuple[Action, ...]:
    receives = [receive_of(schedule, action) for action in order]
    made = [receive for receive in receives[:prefetch] if receive is not None]
    for i, action in enumerate(order):
        made.append(action)
        if (send := send_of(schedule, action)) is not None:
            made.append(send)
        if i + prefetch < len(order) and (receive := receives[i + prefetch]) is not None:
            made.append(receive)
    return tuple(made)


def receive_of(schedule: Schedule, action: Action) -> Action | None:
    """The receive that an action reads; None if it reads nothing from another rank."""
    need = needs(action, schedule.num_stages)
    if need is None or _is_local(schedule, need.stage, action):
        return None
    kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
    return Action(action.stage, kind, action.microbatch)


def send_of(schedule: Schedule, action: Action) -> Action | None:
    """The send of an action's output; None if no other rank needs it."""
    kind = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}.get(action.kind)
    to = action.stage + (1 if kind is Kind.SEND_F else -1)
    if kind is None or not 0 <= to < schedule.num_stages:
        return None
    if _is_local(schedule, to, action):
        return None
    return Action(action.stage, kind, action.microbatch)


def _is_local(schedule: Schedule, stage: int, action: Action) -> bool:
    """Whether another stage of an action's microbatch is on its rank."""
    i = action.microbatch
    return schedule.rank_of(stage, i) == schedule.rank_of(action.stage, i)


def check_link_order(schedule: Schedule) -> None:
    """Checks that each stage receives in the order in which its neighbour sends.

    The links of devices match sends and receives by their order (core/transfers.py). With this
    order they cannot deadlock where compute does not: links do not wait for each other.

    Args:
        schedule: A schedule with transfers.

    Raises:
        UsageError: An order differs; the message names both actions.
    """
    sent: dict[tuple[int, Kind], list[Action]] = {}
    received: dict[tuple[int, Kind], list[Action]] = {}
    read: dict[tuple[int, Kind], list[Action]] = {}
    for order in schedule.orders:
        for action in order:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                forward = action.kind is Kind.SEND_F
                to = action.stage + (1 if forward else -1)
                kind = Kind.RECV_F if forward else Kind.RECV_B
                sent.setdefault((to, kind), []).append(Action(to, kind, action.microbatch))
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                received.setdefault((action.stage, action.kind), []).append(action)
            elif (receive := receive_of(schedule, action)) is not None:
                read.setdefault((receive.stage, receive.kind), []).append(receive)
    for link, expected in sent.items():
        for found in (received[link], read[link]):
            for one, other in zip(expected, found, strict=True):
                if one != other:
                    raise UsageError(
                        f"schedule {schedule.name}: {one} is sent where {other} is received: on "
                        "a device, a stage receives microbatches in the order in which they are "
                        "sent"
                    )


__all__ = ["PREFETCH", "check_link_order", "receive_of", "send_of", "with_transfers"]
