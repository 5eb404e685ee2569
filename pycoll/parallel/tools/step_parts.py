"""What the time of a step consists of on all ranks: computing, communication, waiting."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycoll.parallel.core.step_result import StepResult


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step, as the mean of all ranks; the three parts add up to `seconds`.

    Attributes:
        seconds: Duration of the step.
        tokens: Tokens of all replicas.
        compute_s: Seconds in which a rank computed.
        communication_s: Seconds that every rank spent in collectives, also the last one.
        waiting_s: The rest of the seconds in collectives: waiting for later ranks; and the idle
            time of pipeline stages.
    """

    seconds: float
    tokens: int
    compute_s: float
    communication_s: float
    waiting_s: float


def write(path: Path, last: StepResult) -> None:
    """Appends a step of this rank to a file for each rank."""
    times_s = (last.seconds, last.waited_s, last.bubble_s)
    entry = {"times_s": times_s, "tokens": last.tokens}
    with _of_rank(path, last.rank).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read(path: Path, num_ranks: int, skipped: int) -> list[StepParts]:
    """Steps of all ranks, without the first `skipped`; empty if a rank wrote nothing."""
    files = [_of_rank(path, rank) for rank in range(num_ranks)]
    if not all(file.exists() for file in files):
        return []
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    steps = list(zip(*ranks, strict=False))[skipped:]  # a rank may have ended one step later
    return [parts([tuple(of["times_s"]) for of in step], step[0]["tokens"]) for step in steps]


def parts(ranks: Sequence[tuple[float, float, float]], tokens: int) -> StepParts:
    """Divides a step.

    The rank that is last in all collectives waits for no other one: what it spends there is the
    communication itself. Other ranks spend as much, and wait in addition.

    Args:
        ranks: For each rank the seconds of the step, of them those in collectives, and those in
            which its pipeline stage was idle.
        tokens: Tokens of all replicas.
    """
    seconds = statistics.fmean(of[0] for of in ranks)
    waited_s = statistics.fmean(of[1] for of in ranks)
    idle_s = statistics.fmean(of[2] for of in ranks)
    communication_s = min(of[1] for of in ranks)
    return StepParts(
        seconds,
        tokens,
        seconds - waited_s - idle_s,
        communication_s,
        waited_s - communication_s + idle_s,
    )


def median(steps: list[StepParts]) -> StepParts:
    """The step of median duration; of an even number, the shorter one of two."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.{rank}")


__all__ = ["StepParts", "median", "parts", "read", "write"]
