"""The order that most schedules share: warm-up forwards, then forward and backward in turn."""

from __future__ import annotations

from collections.abc import Sequence

from pycoll.parallel.pipeline.schedules.actions import Action, Kind


def in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards left."""
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[len(forwards) - warmup :]
    return tuple(order)


def split_backward(order: Sequence[Action], delay: int) -> tuple[Action, ...]:
    """Replaces every B by an I and a W; the W comes `delay` backwards later, or at the end.

    No rank waits for weight gradients, so they fill the time in which this rank would wait.
    """
    waiting: list[Action] = []
    made: list[Action] = []
    for action in order:
        if action.kind is not Kind.B:
            made.append(action)
            continue
        made.append(Action(action.stage, Kind.I, action.microbatch))
        waiting.append(Action(action.stage, Kind.W, action.microbatch))
        if len(waiting) > delay:
            made.append(waiting.pop(0))
    return (*made, *waiting)


def rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """Groups of `num_ranks` microbatches or a few more, as even as possible.

    A group smaller than the number of ranks would stall: its first microbatch comes around before
    its last one has left.
    """
    count = max(1, num_microbatches // num_ranks)
    base, more = divmod(num_microbatches, count)
    groups, first = [], 0
    for i in range(count):
        size = base + (i < more)
        groups.append(range(first, first + size))
        first += size
    return groups
