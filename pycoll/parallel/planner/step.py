"""A step of one layout: its stages, their pipeline, what follows it, and what its ranks keep."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.schedules.actions import Costs, Schedule
from pycoll.parallel.pipeline.schedules.simulate_pipeline import Timetable, peak_live, timetable
from pycoll.parallel.planner.layouts import Layout
from pycoll.parallel.planner.network import Network
from pycoll.parallel.planner.pieces import Calls, Piece, Pieces
from pycoll.parallel.tools.footprint import bytes_of_bucket
from pycoll.topology import Topology

# Bytes per element that AdamW reads and writes beside the weights: gradient, two moments twice.
_STEP_BYTES = 5 * 4
_STEADY = 2  # microbatches per stage after which a pipeline's time grows evenly


class Assumptions(Protocol):
    """What a step takes from a cost model (CostModel)."""

    cluster: Topology
    moments: int
    overlap: bool
    prefetch: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step costs.

    Attributes:
        layout: The layout.
        seconds: Time of a step.
        compute_s: Time in which the slowest rank computes.
        bubble_s: Time in which the slowest rank waits for other stages.
        exposed_s: Time of communication that no computation hides, on the slowest rank.
        parts_s: `exposed_s` by axes.
        memory: Bytes of the rank that keeps most.
        flops: Operations of all ranks, with what is computed again.
        stages: Cost of each block for `parallelize(costs=)`, if it matters.
    """

    layout: Layout
    seconds: float
    compute_s: float
    bubble_s: float
    exposed_s: float
    parts_s: dict[str, float]
    memory: int
    flops: int
    stages: list[float] | None = None


@dataclass(slots=True)
class Stage:
    """Sums over the pieces of a stage: seconds of both passes with their collectives."""

    pieces: list[Piece]
    forward_s: float
    backward_s: float
    exposed: dict[str, float]  # of one microbatch, by axes

    def wait_for(self, message_s: float) -> None:
        """Adds a message between stages to each pass."""
        self.forward_s += message_s
        self.backward_s += message_s
        self.exposed["pp"] = self.exposed.get("pp", 0.0) + 2 * message_s

    @property
    def compute_s(self) -> float:
        return sum(piece.forward_s + piece.backward_s for piece in self.pieces)


def cut_stages(
    pieces: Pieces, layout: Layout, network: Network, *, even: bool
) -> tuple[list[Stage], list[float] | None]:
    """The stages, cut so that the slowest one is as fast as possible, and the blocks' costs."""
    if layout.pp == 1:
        return [_stage([pieces.first, *pieces.blocks, pieces.last], network)], None

    def cost(piece: Piece) -> float:
        stage = _stage([piece], network)
        return stage.forward_s + stage.backward_s

    count = layout.pp * pipeline.generator(layout.schedule).default_stages
    if even and len(pieces.blocks) % count:
        raise UsageError(f"plan: {len(pieces.blocks)} blocks do not divide among {count} stages")
    each = {id(piece): piece for piece in pieces.blocks}
    known = {key: cost(piece) for key, piece in each.items()}
    costs = [known[id(piece)] for piece in pieces.blocks]
    if not even:
        costs[0] += cost(pieces.first)
        costs[-1] += cost(pieces.last)
    bounds = pipeline.split(costs, count)
    cut = [pieces.blocks[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    cut[0], cut[-1] = [pieces.first, *cut[0]], [*cut[-1], pieces.last]
    made: dict[tuple[int, ...], Stage] = {}  # stages of equal pieces are one
    for of in cut:
        if tuple(map(id, of)) not in made:
            made[tuple(map(id, of))] = _stage(of, network)
    return [made[tuple(map(id, of))] for of in cut], costs


def _stage(pieces: list[Piece], network: Network) -> Stage:
    exposed: dict[str, float] = {}
    times = []
    for of in ("forward", "backward"):
        seconds = sum(getattr(piece, f"{of}_s") for piece in pieces)
        for piece in pieces:
            for axes, taken_s in _calls_s(getattr(piece, f"{of}_calls"), network).items():
                exposed[axes] = exposed.get(axes, 0.0) + taken_s
                seconds += taken_s
        times.append(seconds)
    forward_s, backward_s = times
    return Stage(pieces, forward_s, backward_s, exposed)


def _calls_s(calls: Calls, network: Network) -> dict[str, float]:
    """Seconds of collectives, by axes."""
    found: dict[str, float] = {}
    for (axes, collective, nbytes), count in calls.items():
        # Keys and values travel around a ring of cp while the rank computes with those before.
        if collective == "send":
            continue
        seconds = count * network.collective_s(collective, nbytes, *axes.split("+"))
        found[axes] = found.get(axes, 0.0) + seconds
    return found


class Step:
    """A step of one layout."""

    def __init__(
        self,
        model: Assumptions,
        layout: Layout,
        network: Network,
        hidden: int,
        stages: list[Stage],
        costs: list[float] | None,
    ) -> None:
        self.model, self.layout, self.network, self.stages = model, layout, network, stages
        self.hidden, self.costs = hidden, costs
        device = model.cluster.device
        assert device is not None
        self.device = device
        self.ranks = [stages]  # the stages of each rank
        if layout.pp > 1:
            self.ranks = [[] for _ in range(layout.pp)]
            for stage, rank in zip(stages, self.placed(1).schedule.placement, strict=True):
                self.ranks[rank].append(stage)
        self._added: dict[tuple[int, ...], dict[str, float]] = {}

    def few_microbatches(self) -> int:
        """The microbatches of a step that are simulated."""
        v = pipeline.generator(self.layout.schedule).default_stages if self.layout.pp > 1 else 1
        return min(self.layout.microbatches, max(_STEADY * self.layout.pp * v, 1))

    def placed(self, microbatches: int) -> Timetable:
        """The schedule of some microbatches, in an order in which it can run."""
        return _timetable(self.layout.schedule, self.layout.pp, microbatches)

    def prediction(self) -> Prediction:
        """Adds everything up."""
        layout, m = self.layout, self.layout.microbatches
        ends, schedule = self._passes()
        each = [self.after_s(stages) for stages in self.ranks]
        totals = [end + sum(of.values()) for end, of in zip(ends, each, strict=True)]
        slowest = max(range(layout.pp), key=lambda rank: totals[rank])
        mine = self.ranks[slowest]
        parts = dict(each[slowest])
        step_s = parts.pop("optimizer", 0.0)
        for stage in mine:
            for axes, seconds in stage.exposed.items():
                parts[axes] = parts.get(axes, 0.0) + m * seconds
        compute_s = m * sum(stage.compute_s for stage in mine) + step_s
        exposed_s = sum(parts.values())
        per_rank = sum(piece.flops for stage in self.stages for piece in stage.pieces)
        return Prediction(
            layout,
            totals[slowest],
            compute_s,
            max(0.0, totals[slowest] - compute_s - exposed_s),
            exposed_s,
            parts,
            max(self._memory(rank, schedule) for rank in range(layout.pp)),
            per_rank * m * layout.dp * layout.ep * layout.cp * layout.tp,
            self.costs,
        )

    def _passes(self) -> tuple[list[float], Schedule]:
        """When each rank of the pipeline has done its last backward pass."""
        layout, m, few = self.layout, self.layout.microbatches, self.few_microbatches()
        table = self.placed(few)
        ends = self._ends(table)
        if few < m:  # behind `few` microbatches the time grows by the same for each
            fewer = few - layout.pp  # whole rounds of schedules that have rounds
            before = self._ends(self.placed(fewer))
            slope = (max(ends) - max(before)) / (few - fewer)
            ends = [end + (m - few) * slope for end in ends]
        return ends, table.schedule

    def _ends(self, table: Timetable) -> list[float]:
        schedule = table.schedule
        forward = sum(stage.forward_s for stage in self.stages) / schedule.num_ranks
        backward = sum(stage.backward_s for stage in self.stages) / schedule.num_ranks
        mean = (forward + backward) / schedule.stages_per_rank
        scale = [(s.forward_s + s.backward_s) / mean if mean else 1.0 for s in self.stages]
        return table.rank_ends(Costs(forward, backward / 2, backward / 2, self.transfer_s()), scale)

    def transfer_s(self) -> float:
        """Seconds of a message between stages, while the ranks compute."""
        return self.network.message_s(self.hidden, "pp") if self.model.overlap else 0.0

    def after_s(self, stages: list[Stage]) -> dict[str, float]:
        """Seconds that the replicas and the optimizer of a rank's stages add, by axes."""
        key = tuple(map(id, stages))
        if key not in self._added:
            self._added[key] = self._made_after_s(stages)
        return self._added[key]

    def _made_after_s(self, stages: list[Stage]) -> dict[str, float]:
        layout, network = self.layout, self.network
        added = {"optimizer": 0.0}
        hides_s = sum(stage.backward_s for stage in stages) if self.model.overlap else 0.0
        for (axes, item, main), count in weights_of([p for s in stages for p in s.pieces]).items():
            shards = network.size(*axes)
            added["optimizer"] += self.device.seconds(
                0, count / (shards if layout.zero else 1) * (_STEP_BYTES + 2 * item)
            )
            if shards == 1:
                continue
            key = "+".join(axis for axis in axes if layout.sizes[axis] > 1)
            often = layout.microbatches if layout.zero >= 2 and layout.pp == 1 else 1
            kind = "reduce_scatter" if layout.zero else "all_reduce"
            gradients = network.collective_s(kind, count * main, *axes)
            # The buckets of all but the first layers travel while the backward pass goes on.
            blocks = max(1, sum(len(stage.pieces) for stage in stages))
            seconds = often * max(gradients / blocks, gradients - hides_s)
            gather = network.collective_s("all_gather", count * item, *axes)
            if layout.zero == 3 and layout.pp == 1:
                again = 2 * layout.microbatches * gather
                if self.model.prefetch:  # one network carries weights and gradients
                    busy = layout.microbatches * sum(s.forward_s + s.backward_s for s in stages)
                    seconds = max(seconds, again + often * gradients - busy)
                else:
                    seconds += again
            elif layout.zero:
                seconds += gather
            added[key] = added.get(key, 0.0) + seconds
        return added

    def _memory(self, rank: int, schedule: Schedule) -> int:
        """Bytes of a rank's weights, gradients, optimizer state and activations."""
        kept = [sum(piece.kept for piece in stage.pieces) for stage in self.stages]
        live = peak_live(schedule.orders[rank], kept) if self.layout.pp > 1 else kept[0]
        return self.lasting(self.ranks[rank]) + live

    def lasting(self, stages: list[Stage]) -> int:
        """Bytes of weights, gradients and optimizer state of a rank's stages."""
        pieces = [piece for stage in stages for piece in stage.pieces]
        return lasting_bytes(pieces, self.layout.zero, self.network, self.model.moments)


def lasting_bytes(pieces: Sequence[Piece], zero: int, network: Network, moments: int) -> int:
    """Bytes of weights, gradients and optimizer state of some pieces on a rank."""
    total = sum(piece.frozen for piece in pieces)
    for (axes, item, main), count in weights_of(pieces).items():
        shards = network.size(*axes) if zero else 1
        total += sum(bytes_of_bucket(count, item, main, shards, 0, zero, moments))
    return total


def weights_of(pieces: Sequence[Piece]) -> dict[tuple[tuple[str, ...], int, int], int]:
    """Elements of the weights of some pieces, by axes, bytes, and bytes of the optimizer's copy."""
    found: dict[tuple[tuple[str, ...], int, int], int] = {}
    for piece in pieces:
        for key, count in piece.weights.items():
            found[key] = found.get(key, 0) + count
    return found


@functools.lru_cache(maxsize=256)
def _timetable(name: str, num_ranks: int, microbatches: int) -> Timetable:
    return timetable(pipeline.build(name, num_ranks, microbatches))


__all__ = ["Prediction", "Stage", "Step", "cut_stages", "lasting_bytes"]
