"""When everything happens: a schedule played with given costs, without a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Action, Kind, Schedule
from pycoll.parallel.pipeline.schedules.registry import Costs


@dataclass(frozen=True, slots=True)
class Event:
    """An action of a rank, from `start` to `end` in the unit of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        events: All compute, ordered by rank and time.
        time: From the first start to the last end.
        busy: The time that each rank computes.
        peak_live: The most microbatches, in chunks of one stage, that each rank holds.
    """

    events: tuple[Event, ...]
    time: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Idle over busy time, of all ranks: (p - 1) / m for GPipe."""
        busy = sum(self.busy)
        return len(self.busy) * self.time / busy - 1 if busy else 0.0

    @property
    def idle_share(self) -> float:
        """Idle time over all time: (p - 1) / (m + p - 1) for GPipe."""
        return 1 - sum(self.busy) / (len(self.busy) * self.time) if self.time else 0.0

    def idle_share_between(self, start: float, end: float) -> float:
        """The same of a part of the time."""
        if end <= start:
            return 0.0
        busy = sum(max(0.0, min(e.end, end) - max(e.start, start)) for e in self.events)
        return 1 - busy / (len(self.busy) * (end - start))

    @property
    def steady(self) -> tuple[float, float]:
        """From the end of the first backward of stage 0 to the start of its last forward."""
        first = [event for event in self.events if event.action.stage == 0]
        starts = [event.start for event in first if event.action.kind is Kind.F]
        ends = [event.end for event in first if event.action.kind in (Kind.B, Kind.I)]
        return min(ends), max(starts)


def needs(action: Action, num_stages: int) -> Action | None:
    """What the stage before or behind must have done before an action; B stands for B or I."""
    stage, i = action.stage, action.microbatch
    if action.kind is Kind.F:
        return Action(stage - 1, Kind.F, i) if stage > 0 else None
    if action.kind in (Kind.B, Kind.I):
        return Action(stage + 1, Kind.B, i) if stage + 1 < num_stages else None
    return None


def done_as(action: Action) -> Action:
    """An action as others wait for it: they take I as they take B."""
    return Action(action.stage, Kind.B, action.microbatch) if action.kind is Kind.I else action


def peak_live(order: Sequence[Action], weights: Sequence[int] | None = None) -> int:
    """The most forwards of an order whose backward, or weight gradient, is not done yet.

    With `weights`, each counts as much as that of its stage.
    """
    peak = live = 0
    for action in order:
        weight = 1 if weights is None else weights[action.stage]
        live += weight * ((action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W)))
        peak = max(peak, live)
    return peak


def peak_versions(order: Sequence[Action]) -> int:
    """The most versions of a stage's weights that an order's microbatches in flight have seen."""
    peak = version = 0
    seen: dict[tuple[int, int], int] = {}
    for action in order:
        place = action.stage, action.microbatch
        if action.kind is Kind.F:
            seen[place] = version
            peak = max(peak, len(set(seen.values())))
        elif action.kind in (Kind.B, Kind.W):
            del seen[place]
        version += action.kind is Kind.U
    return peak


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    stage_scale: Sequence[float] | None = None,
) -> Simulation:
    """Plays a schedule: every rank does its actions in order, each as early as it can.

    Args:
        schedule: What to play.
        costs: Of one microbatch on one rank; a stage takes its part. Default: 1 for F, I and W.
        stage_scale: How much longer each stage takes than the others do. Default: 1 for all.

    Returns:
        Times, bubble and memory.

    Raises:
        UsageError: the schedule deadlocks.

    Cost: about 2 us per action.
    """
    costs = costs or Costs()
    scale = stage_scale or [1.0] * schedule.num_stages
    if len(scale) != schedule.num_stages:
        raise UsageError(f"{len(scale)} stage costs for {schedule.num_stages} stages")
    part = 1 / schedule.stages_per_rank
    length = {
        Kind.F: costs.forward * part,
        Kind.I: costs.backward_input * part,
        Kind.W: costs.backward_weight * part,
        Kind.B: (costs.backward_input + costs.backward_weight) * part,
        Kind.U: 0.0,
    }
    done: dict[Action, float] = {}
    events: list[list[Event]] = [[] for _ in schedule.orders]
    clock = [0.0] * schedule.num_ranks
    orders = schedule.without(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B).orders
    at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                start = clock[rank]
                need = needs(action, schedule.num_stages)
                if need is not None:
                    if need not in done:
                        break
                    there = schedule.placement[need.stage]
                    start = max(start, done[need] + (costs.transfer if there != rank else 0.0))
                end = start + length[action.kind] * scale[action.stage]
                done[done_as(action)] = clock[rank] = end
                events[rank].append(Event(rank, action, start, end))
                at[rank] += 1
                moved = True
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        from pycoll.parallel.pipeline.schedules.validate import deadlock

        raise UsageError(deadlock(schedule, at))
    busy = tuple(sum(event.end - event.start for event in of) for of in events)
    flat = tuple(event for of in events for event in of)
    return Simulation(flat, max(clock), busy, tuple(peak_live(order) for order in orders))


__all__ = ["Event", "Simulation", "needs", "peak_live", "peak_versions", "simulate"]
