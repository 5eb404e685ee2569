"""Ranks that fail or make a wrong call: the right error on every other rank, in time."""

from __future__ import annotations

import sys

import faults
import mistakes
import numpy as np
import pytest
from driving import MINUTES, drive, drive_for_minutes, num_examples
from hypothesis import strategies as st

from pycoll import run_ranks

pytestmark = pytest.mark.ranks

MISMATCH_S = 10.0  # loose, for a busy machine; campaigns print times
# The first sleep or wait for seconds.
LONG = ("stop", "too_late", "join_too_late")
SHORT = tuple(kind for kind in faults.FAULTS if kind not in LONG)


def check_fault(fault: faults.Fault) -> float:
    """Seconds from the fault, or from the call that it hit, to the last error."""
    outcome = faults.run(fault)
    if outcome.complaint:
        print(f"\nfuzz: {fault}: {outcome.complaint}\n{outcome.seen}", file=sys.stderr)
    assert not outcome.complaint, (fault, outcome.complaint)
    return outcome.slowest_s


Mistakes = tuple[int, bool, tuple[mistakes.Mistake, ...]]


def several_mistakes(kinds: list[str] | None = None) -> st.SearchStrategy[Mistakes]:
    some = st.lists(mistakes.mistakes(kinds), min_size=5, max_size=20).map(tuple)
    return st.tuples(st.integers(2, 5), st.booleans(), some)


def check_mistakes(case: Mistakes) -> list[float]:
    """Seconds of each mistake from the last rank's entry to the last rank's error."""
    n, threads, made = case
    times_s = []
    outcomes = run_ranks(
        lambda comm: [mistakes.make(comm, m) for m in made], n, threads=threads, timeout_s=20
    )
    for idx, mistake in enumerate(made):
        seen = [outcome[idx] for outcome in outcomes]
        complaint = mistakes.complaint(mistake, seen)
        assert not complaint, (n, threads, mistake, complaint)
        times_s.append(mistakes.took_s(seen))
        assert times_s[-1] < MISMATCH_S, (n, threads, mistake, seen)
    return times_s


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SHORT)
def test_fuzz_ranks_that_fail_are_named_by_all_others_in_time(kind) -> None:
    faults.warm_up()
    drive(check_fault, faults.faults((kind,)), num_examples(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_fuzz_ranks_that_stop_are_named_by_all_others_in_time(kind) -> None:
    faults.warm_up()
    drive(check_fault, faults.faults((kind,)), num_examples(2))


# A root that waits until all ranks have read a slot waits for the rank that does not read it.
BIG, SMALL = (100, 1_000_000), (1_000_000, 4096)
ROUND, SCANS = (
    ("all_gather", "messages", "messages", "broadcast"),
    ("broadcast", "scan", "broadcast"),
)
KILLED = faults.Fault(5, False, "kill", 29, 11, 950, BIG, ROUND, False)
STOPPED = faults.Fault(5, False, "stop", 7, 8, 881, SMALL, SCANS, False)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "fault", [KILLED, pytest.param(STOPPED, marks=pytest.mark.slow)], ids=["kill", "stop"]
)
def test_reader_of_a_slot_with_many_readers_that_fails_is_named(fault) -> None:
    faults.warm_up()
    check_fault(fault)


@pytest.mark.timeout(300)
def test_fuzz_calls_that_differ_raise_mismatch_on_every_rank() -> None:
    drive(check_mistakes, several_mistakes(), num_examples(6))


@pytest.mark.soak
@pytest.mark.timeout(int(60 * MINUTES) + 600)
def test_fuzz_faults_for_minutes_are_named_in_time() -> None:
    faults.warm_up()
    assert drive_for_minutes(check_fault, faults.faults(), share=0.2) > 0
    assert drive_for_minutes(check_mistakes, several_mistakes(), share=0.1) > 0


def report(kind: str, times_s: list[float]) -> None:
    ms = "median {:.2f}, p99 {:.2f}, max {:.2f} ms".format(
        *(1e3 * np.quantile(times_s, q) for q in (0.5, 0.99, 1))
    )
    print(f"\n{kind}: {len(times_s)} of {len(times_s)} right, {ms}")


@pytest.mark.soak
@pytest.mark.parametrize("kind", mistakes.KINDS)
def test_campaign_of_calls_that_differ_counts_and_times(kind) -> None:
    times_s: list[float] = []
    drive(lambda case: times_s.extend(check_mistakes(case)), several_mistakes([kind]), 10)
    report(kind, times_s)
