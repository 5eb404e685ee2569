"""One row of the comparison: every library's turns at one message, interleaved."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from jobs import Job, UnsupportedError
from peers import PeerError
from record import Case, Timing

# A sample is a block of calls: long enough for the clock, which costs some 50 ns, not to matter.
BLOCK_US, MAX_CALLS = 100.0, 50
TURN_US, WARMUP_US = 100_000.0, 2_000.0
# A library that takes longer than this for the fewest samples of all rounds sits out some rounds.
ROW_US = 8_000_000.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: the rounds of a row, and the fewest and most samples of a turn."""

    rounds: int
    fewest: int
    most: int


FULL, QUICK = Effort(8, 3, 20), Effort(3, 3, 10)


@dataclass(frozen=True, slots=True)
class Turn:
    """Warm-up calls, samples, calls per sample; and in how many rounds the library takes part."""

    warmup: int
    samples: int
    block: int
    rounds: int

    @staticmethod
    def of(call_us: float, effort: Effort) -> Turn:
        """For calls of about call_us."""
        block = round(min(max(BLOCK_US / call_us, 1), MAX_CALLS))
        samples = round(min(max(TURN_US / (call_us * block), effort.fewest), effort.most))
        warmup = round(min(max(WARMUP_US / call_us, 1), 2 * MAX_CALLS))
        turn_us = call_us * (warmup + samples * block)
        rounds = round(min(max(ROW_US / turn_us, 1), effort.rounds))
        return Turn(warmup, samples, block, rounds)


def measure_row(
    jobs: dict[str, Job],
    case: Case,
    nbytes: int,
    effort: Effort,
    failed: Callable[[str, PeerError | UnsupportedError], None],
) -> dict[str, Timing]:
    """All rounds of one message; `failed` is told which libraries cannot take part, and why.

    One that fails is stopped and leaves `jobs`; one that has no such collective does not.

    The first pass checks the results and finds out how long a call takes, the others measure, and
    the last checks again.
    """
    turns: dict[str, Turn] = {}
    samples_us: dict[str, list[float]] = {}

    def turn(name: str, round_idx: int) -> None:
        job = jobs[name]
        if round_idx == 0:
            job.prepare(case.collective, case.dtype, nbytes)
            job.check()
            # Twice: a library's first calls of a size may plan, connect and fault pages in.
            trial = Turn.of(statistics.median(job.measure(1, 3, 1)), effort)
            warm_us = job.measure(trial.warmup, min(trial.samples, 5), trial.block)
            turns[name], samples_us[name] = Turn.of(statistics.median(warm_us), effort), []
        elif round_idx > effort.rounds:
            job.check()
        elif round_idx <= turns[name].rounds:
            plan = turns[name]
            samples_us[name] += job.measure(plan.warmup, plan.samples, plan.block)

    taking_part = list(jobs)
    for round_idx in range(effort.rounds + 2):
        for name in random.sample(taking_part, len(taking_part)):
            try:
                turn(name, round_idx)
            except UnsupportedError as reason:
                taking_part.remove(name)
                failed(name, reason)
            except PeerError as error:
                taking_part.remove(name)
                jobs.pop(name).stop()
                failed(name, error)
    return {name: Timing.of(samples_us[name], turns[name].block) for name in taking_part}
