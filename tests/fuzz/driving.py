"""How the fuzz tests are driven: seeds that replay, sizes for every commit and for `make soak`.

PYCOLL_TEST_SEED       of the random cases; a failure prints it
PYCOLL_FUZZ_EXAMPLES   cases of each test, 0 < n; else a size that suits every commit
PYCOLL_SOAK_MINUTES    the campaigns of `make soak`, in all; every round has a seed of its own
PYCOLL_FUZZ_SHRINK=0   keeps a failing case as it is, which for a hang saves many timeouts
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SEED = int(os.environ.get("PYCOLL_TEST_SEED", "20240817"))
MINUTES = float(os.environ.get("PYCOLL_SOAK_MINUTES", "1"))


def num_examples(default: int) -> int:
    return int(os.environ.get("PYCOLL_FUZZ_EXAMPLES", default))


def drive(
    check: Callable[[Any], None],
    cases: st.SearchStrategy[Any],
    examples: int,
    seed_value: int = SEED,
    shrink: bool = False,
) -> None:
    """Checks so many random cases. A failure prints how to see it again."""
    shrink = bool(int(os.environ.get("PYCOLL_FUZZ_SHRINK", shrink)))
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @seed(seed_value)
    @given(cases)
    def run(case: Any) -> None:
        check(case)

    try:
        run()
    except BaseException:
        print(
            f"\nfuzz: PYCOLL_TEST_SEED={seed_value} PYCOLL_FUZZ_EXAMPLES={examples} replays it, "
            "PYCOLL_FUZZ_SHRINK=1 makes it smaller",
            file=sys.stderr,
        )
        raise


def drawn(cases: st.SearchStrategy[Any], seed_value: int) -> Any:
    """The case of this seed."""
    # The first one that hypothesis draws is always the simplest.
    seen: list[Any] = []
    drive(seen.append, cases, 2, seed_value)
    return seen[-1]


def drive_for_minutes(
    check: Callable[[Any], None], cases: st.SearchStrategy[Any], share: float
) -> int:
    """Rounds of 50 cases until this share of PYCOLL_SOAK_MINUTES is over. Returns how many."""
    end = time.monotonic() + share * MINUTES * 60
    rounds = 0
    while time.monotonic() < end:
        drive(check, cases, num_examples(50), SEED + 1 + rounds, shrink=True)
        rounds += 1
        print(f"fuzz: {rounds} rounds, {max(0, end - time.monotonic()):.0f} s to go", flush=True)
    return rounds
