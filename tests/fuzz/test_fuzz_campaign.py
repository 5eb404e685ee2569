"""Campaigns: many faults and mistakes of each kind, counted and timed in a table that is printed.

The other fuzz tests draw cases at random for a while. These make a fixed number of each kind, so
that a figure can be stated: 100 of 100 right, within so many milliseconds, and nothing left behind.
"""

from __future__ import annotations

import random

import faults
import mistakes
import numpy as np
import pytest
from driving import SEED

from pycoll import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(1200)]

TRIES = 100  # of each mistake
RUNS = 60  # of each fault
LIMIT_MS = 1000  # from the last entry into a call that differs to the last error


def report(kind: str, times_ms: list[float], num_right: int) -> None:
    median, p99 = np.median(times_ms), np.quantile(times_ms, 0.99)
    print(
        f"\n{kind:12} {num_right:4} of {len(times_ms)} right, median {median:.2f} ms, "
        f"p99 {p99:.2f} ms, max {max(times_ms):.2f} ms"
    )


def random_mistake(kind: str, rng: random.Random) -> mistakes.Mistake:
    return mistakes.Mistake(
        kind=kind, odd=rng.randrange(60), count=rng.choice(mistakes.SIZES),
        healthy=rng.randrange(4), late=rng.randrange(60), late_ms=rng.choice([0, 0, 1, 5]),
        choice=rng.randrange(60),
    )  # fmt: skip


@pytest.mark.parametrize("kind", mistakes.KINDS)
def test_campaign_of_calls_that_differ_raises_mismatch_on_every_rank_in_time(kind) -> None:
    rng = random.Random(SEED)
    times_ms, failures = [], []
    for n, tries in (2, 34), (3, 33), (4, TRIES - 67):
        made = [random_mistake(kind, rng) for _ in range(tries)]
        outcomes = run_ranks(
            lambda comm, made=made: [mistakes.make(comm, m) for m in made], n, timeout_s=20
        )
        for idx, mistake in enumerate(made):
            seen = [outcome[idx] for outcome in outcomes]
            times_ms.append(1e3 * mistakes.took_s(seen))
            complaint = mistakes.complaint(mistake, seen)
            if complaint or times_ms[-1] > LIMIT_MS:
                failures.append(f"n={n} {mistake}, {times_ms[-1]:.0f} ms: {complaint}")
    report(kind, times_ms, len(times_ms) - len(failures))
    assert not failures, "\n".join(failures[:10])


def random_fault(kind: str, rng: random.Random) -> faults.Fault:
    return faults.Fault(
        n=rng.randint(2, 5), threads=False, kind=kind, victim=rng.randrange(60),
        at=rng.randrange(faults.CALLS), at_us=rng.choice([None, rng.randrange(3000)]),
        counts=tuple(rng.choice(faults.COUNTS) for _ in range(2)),
        calls=tuple(rng.choice(faults.CALL_NAMES) for _ in range(rng.randint(1, 4))),
        asynchronous=rng.random() < 0.3,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["kill", "stop", "exit"])
def test_campaign_of_ranks_that_fail_names_them_in_time(kind) -> None:
    """The times after SIGSTOP include the timeout of faults.SHORT_S."""
    faults.warm_up()
    rng = random.Random(SEED)
    times_ms, failures = [], []
    for _ in range(RUNS):
        fault = random_fault(kind, rng)
        outcome = faults.run(fault)
        times_ms.append(1e3 * outcome.slowest_s)
        if outcome.complaint:
            failures.append(f"{fault}: {outcome.complaint}")
    report(kind, times_ms, RUNS - len(failures))
    assert not failures, "\n".join(failures[:10])
