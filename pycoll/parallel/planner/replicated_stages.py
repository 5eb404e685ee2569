"""Stages with replicas: PipeDream's planner, as a function of a profile.

Data parallelism is the plan with one stage, a plain pipeline the one without replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pycoll.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layer:
    """A row of a profile.

    Attributes:
        seconds: Forward and backward pass of a minibatch.
        output: Bytes of the activations that the layer passes on.
        weights: Bytes of its weights.
    """

    seconds: float
    output: float
    weights: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, from `first` up to but without `end`, on `replicas` ranks."""

    first: int
    end: int
    replicas: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The stages of a pipeline.

    Attributes:
        stages: The stages, in order.
        seconds: Time between two minibatches in the steady state: that of the slowest stage.
        in_flight: NOAM: minibatches that the first stage admits before a backward pass is over.
    """

    stages: tuple[Stage, ...]
    seconds: float
    in_flight: int

    @property
    def shape(self) -> str:
        """Replicas of the stages, such as "3-1"."""
        return "-".join(str(stage.replicas) for stage in self.stages)


def stage_s(layers: Sequence[Layer], replicas: int, bytes_per_s: float) -> float:
    """Time between two minibatches of a stage: computing and reducing, shared by its replicas.

    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1, and its published optimizer.
    """
    weights = sum(layer.weights for layer in layers)
    reduce_s = 4 * (replicas - 1) * weights / (replicas * bytes_per_s)
    return (sum(layer.seconds for layer in layers) + reduce_s) / replicas


def replicated_stages(
    layers: Sequence[Layer],
    num_ranks: int,
    bytes_per_s: float,
    *,
    transfers: bool = True,
    straight: bool = False,
) -> StagePlan:
    """Cuts layers into stages and gives each stage replicas, so that the slowest one is fastest.

    Args:
        layers: The profile of the model, in order.
        num_ranks: Number of ranks; all are used.
        bytes_per_s: Bandwidth of a rank's link.
        transfers: Whether the time of activations at both ends of a stage bounds the pipeline.
        straight: One rank for each stage.

    Returns:
        The plan.

    Raises:
        UsageError: There is no layer, no rank, or no plan for so many ranks.

    Cost: O(layers^2 ranks^2).
    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1.
    """
    if not layers or num_ranks < 1 or not bytes_per_s > 0:
        raise UsageError(
            f"stages: {len(layers)} layers, {num_ranks} ranks, {bytes_per_s:g} bytes/s, expected "
            "numbers above 0"
        )
    n = len(layers)
    seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
    weights = [0.0, *accumulate(layer.weights for layer in layers)]

    def one_stage_s(first: int, end: int, m: int) -> float:
        if straight and m > 1:
            return math.inf
        reduce_s = 4 * (m - 1) * (weights[end] - weights[first]) / (m * bytes_per_s)
        return (seconds[end] - seconds[first] + reduce_s) / m

    def passes_s(at: int, replicas: int) -> float:
        """Time of the activations, and of their gradients, at one end of a stage."""
        crosses = transfers and 0 < at < n
        return 2 * layers[at - 1].output / (bytes_per_s * replicas) if crosses else 0.0

    # best[m][end]: time of the layers before `end` on m ranks, number of stages, the last stage.
    none: tuple[float, int, Stage | None] = (math.inf, 0, None)
    best = [[none] * (n + 1)]
    for m in range(1, num_ranks + 1):
        row = [none]
        for end in range(1, n + 1):
            alone_s = max(one_stage_s(0, end, m), passes_s(end, m))
            found = (alone_s, 1, Stage(0, end, m))
            for replicas in range(1, min(m, 2) if straight else m):
                out_s = passes_s(end, replicas)
                for first in range(1, end):
                    before_s, count, _ = best[m - replicas][first]
                    slowest = max(before_s, out_s, passes_s(first, replicas))
                    if slowest > found[0]:
                        continue
                    slowest = max(slowest, one_stage_s(first, end, replicas))
                    if (slowest, count + 1) < found[:2]:
                        found = slowest, count + 1, Stage(first, end, replicas)
            row.append(found)
        best.append(row)
    time, _, stage = best[num_ranks][n]
    if not math.isfinite(time):
        raise UsageError(f"stages: {n} layers cannot use {num_ranks} ranks: take fewer")
    stages: list[Stage] = []
    left = num_ranks
    while stage is not None:
        stages.insert(0, stage)
        left -= stage.replicas
        stage = best[left][stage.first][2] if stage.first else None
    return StagePlan(tuple(stages), time, math.ceil(num_ranks / stages[0].replicas))


__all__ = ["Layer", "Stage", "StagePlan", "replicated_stages", "stage_s"]
