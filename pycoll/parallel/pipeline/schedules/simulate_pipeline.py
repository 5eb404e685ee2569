"""Simulates a schedule with given costs, without ranks: the time of every action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Action, Costs, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Event:
    """An action of a rank, from `start` to `end`, in units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of simulating a schedule.

    Attributes:
        events: All compute, ordered by rank and time.
        time: Time from the first start to the last end.
        busy: Compute time of each rank.
        peak_live: The most microbatches that each rank holds, in chunks of one stage.
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
        """Idle share within a part of the time."""
        if end <= start:
            return 0.0
        busy = sum(max(0.0, min(e.end, end) - max(e.start, start)) for e in self.events)
        return 1 - busy / (len(self.busy) * (end - start))

    @property
    def steady(self) -> tuple[float, float]:
        """Time from the end of stage 0's first backward to the start of its last forward."""
        first = [event for event in self.events if event.action.stage == 0]
        starts = [event.start for event in first if event.action.kind is Kind.F]
        ends = [event.end for event in first if event.action.kind in (Kind.B, Kind.I)]
        return min(ends), max(starts)


def needs(action: Action, num_stages: int) -> Action | None:
    """The action of a neighbouring stage that must precede an action; B stands for B or I."""
    stage, i = action.stage, action.microbatch
    if action.kind is Kind.F:
        return Action(stage - 1, Kind.F, i) if stage > 0 else None
    if action.kind in (Kind.B, Kind.I):
        return Action(stage + 1, Kind.B, i) if stage + 1 < num_stages else None
    return None


def waits_for(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions of other ranks that must precede an action.

    An update waits for the gradients of all its microbatches, on all replicas of the stage.
    """
    if action.kind is Kind.U:
        turn = schedule.round_of(action.stage, action.microbatch)
        return tuple(Action(action.stage, Kind.B, i) for i in turn if i != action.microbatch)
    need = needs(action, schedule.num_stages)
    return () if need is None else (need,)


def done_as(action: Action) -> Action:
    """The action that other stages wait for: I counts as B."""
    return Action(action.stage, Kind.B, action.microbatch) if action.kind is Kind.I else action


def deadlock(schedule: Schedule, at: Sequence[int], done: Container[Action]) -> str:
    """Describes the cycle of waits, starting with the first blocked rank."""
    parts, seen = [], set()
    rank = next(r for r, order in enumerate(schedule.orders) if at[r] < len(order))
    while rank not in seen:
        seen.add(rank)
        if at[rank] >= len(schedule.orders[rank]):
            parts.append(f"rank {rank} is done")
            break
        action = schedule.orders[rank][at[rank]]
        need = next(of for of in waits_for(schedule, action) if of not in done)
        next_rank = schedule.rank_of(need.stage, need.microbatch)
        parts.append(f"rank {rank} waits in {action} (position {at[rank]}) for {need}")
        rank = next_rank
    return f"schedule {schedule.name} deadlocks: {'; '.join(parts)}"


def peak_live(order: Sequence[Action], weights: Sequence[int] | None = None) -> int:
    """The most forwards of an order whose backward, or weight gradient, is still to come.

    `weights` gives the weight of each stage's forwards; None: 1.
    """
    peak = live = 0
    for action in order:
        weight = 1 if weights is None else weights[action.stage]
        live += weight * ((action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W)))
        peak = max(peak, live)
    return peak


def peak_versions(order: Sequence[Action], versions: Sequence[int] = ()) -> int:
    """The most versions of a stage's weights that microbatches need at a time.

    `versions` has the version of each microbatch, which is kept until its last microbatch is done;
    empty: each microbatch uses the newest one at its forward.
    """
    users = Counter(versions[a.microbatch] for a in order if versions and a.kind is Kind.F)
    newest = 0
    peak = kept = int(users[newest] > 0)
    used: dict[tuple[int, int], int] = {}
    for action in order:
        place = action.stage, action.microbatch
        if action.kind is Kind.F:
            used[place] = versions[action.microbatch] if versions else newest
            kept += not users[used[place]]
            users[used[place]] += not versions
        elif action.kind in (Kind.B, Kind.W):
            version = used.pop(place)
            users[version] -= 1
            kept -= not users[version]
        elif action.kind is Kind.U:
            newest += 1
            kept += users[newest] > 0
        peak = max(peak, kept)
    return peak


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    stage_scale: Sequence[float] | None = None,
) -> Simulation:
    """Simulates a schedule: every rank runs its actions in order, each as early as possible.

    Args:
        schedule: The schedule to simulate.
        costs: Costs of one microbatch on one rank, divided among its stages; default: 1 each.
        stage_scale: Relative duration of each stage. Default: 1 for all.

    Returns:
        Times, bubble and memory.

    Raises:
        UsageError: The schedule deadlocks.

    Cost: about 2 us per action.
    """
    costs = costs or Costs()
    table = timetable(schedule)
    ends = table.ends(costs, stage_scale)
    lengths = table.lengths(costs, stage_scale)
    events: list[list[Event]] = [[] for _ in schedule.orders]
    for rank, action, end in zip(table.ranks, table.actions, ends, strict=True):
        events[rank].append(Event(rank, action, end - lengths[action.kind][action.stage], end))
    busy = tuple(sum(event.end - event.start for event in of) for of in events)
    flat = tuple(event for of in events for event in of)
    lives = tuple(peak_live(order) for order in table.orders)
    return Simulation(flat, max(ends, default=0.0), busy, lives)


@dataclass(frozen=True, slots=True)
class Timetable:
    """A schedule's compute in an order in which it can run, for any costs.

    Attributes:
        schedule: The schedule.
        orders: The compute of each rank, in order.
        ranks: The rank of each action of the timetable.
        actions: The actions, each behind those that it waits for.
        waits: For each action: the places of those that it waits for, and whether each of them is
            on another rank. The one before it on its rank is the first.
    """

    schedule: Schedule
    orders: tuple[tuple[Action, ...], ...]
    ranks: list[int]
    actions: list[Action]
    waits: list[tuple[tuple[int, bool], ...]]

    def lengths(
        self, costs: Costs, stage_scale: Sequence[float] | None = None
    ) -> dict[Kind, list[float]]:
        """The time of each kind of action in each stage.

        Raises:
            UsageError: `stage_scale` has not one value for each stage.
        """
        num_stages = self.schedule.num_stages
        scale = stage_scale or [1.0] * num_stages
        if len(scale) != num_stages:
            raise UsageError(
                f"stage_scale has {len(scale)} values, expected {num_stages}: one per stage"
            )
        part = 1 / self.schedule.stages_per_rank
        length = {
            Kind.F: costs.forward * part,
            Kind.I: costs.backward_input * part,
            Kind.W: costs.backward_weight * part,
            Kind.B: (costs.backward_input + costs.backward_weight) * part,
            Kind.U: 0.0,
        }
        return {kind: [of * by for by in scale] for kind, of in length.items()}

    def ends(self, costs: Costs, stage_scale: Sequence[float] | None = None) -> list[float]:
        """The end of each action, each as early as possible. Cost: about 0.3 us per action."""
        lengths, transfer = self.lengths(costs, stage_scale), costs.transfer
        ends: list[float] = []
        for action, waits in zip(self.actions, self.waits, strict=True):
            start = 0.0
            for place, is_remote in waits:
                ready = ends[place] + transfer if is_remote else ends[place]
                if ready > start:
                    start = ready
            ends.append(start + lengths[action.kind][action.stage])
        return ends

    def rank_ends(self, costs: Costs, stage_scale: Sequence[float] | None = None) -> list[float]:
        """The end of each rank's last action."""
        last = [0.0] * self.schedule.num_ranks
        for rank, end in zip(self.ranks, self.ends(costs, stage_scale), strict=True):
            last[rank] = end
        return last


def timetable(schedule: Schedule) -> Timetable:
    """Puts the compute of a schedule into an order in which it can run.

    Raises:
        UsageError: The schedule deadlocks.

    Cost: about 2 us per action.
    """
    orders = schedule.without(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B).orders
    table = Timetable(schedule, orders, [], [], [])
    places: dict[Action, int] = {}
    before: list[tuple[tuple[int, bool], ...]] = [()] * schedule.num_ranks
    at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                wanted = waits_for(schedule, action)
                if any(need not in places for need in wanted):
                    break
                others = tuple(
                    (places[need], schedule.rank_of(need.stage, need.microbatch) != rank)
                    for need in wanted
                )
                place = len(table.actions)
                table.ranks.append(rank)
                table.actions.append(action)
                table.waits.append((*before[rank], *others))
                places[done_as(action)] = place
                before[rank] = ((place, False),)
                at[rank] += 1
                moved = True
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        raise UsageError(deadlock(schedule, at, places))
    return table


__all__ = [
    "Event",
    "Simulation",
    "Timetable",
    "needs",
    "peak_live",
    "peak_versions",
    "simulate",
    "timetable",
]
