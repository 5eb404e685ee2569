"""Injects faults by seed, and checks every value that a call returns.

python tests/fuzz/campaign.py --list
python tests/fuzz/campaign.py kills                      # a whole campaign
python tests/fuzz/campaign.py kills --cases 20 --seed 5  # the cases of seeds 5 to 24
python tests/fuzz/campaign.py kills --seed 17 --cases 1  # a failing case once more
python tests/fuzz/campaign.py late --jobs 4              # several at a time, if cases mostly wait

Prints what each failing case complained of and how to run it again. Status 1: a case failed.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import injections
import numpy as np

injections.add_test_folders()

REPORT_EVERY_S = 10.0
MAX_TEXT = 30000


class Tally:
    """What the cases of one kind have shown so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_cases = 0
        self.failing: list[int] = []
        self.notices_s: list[float] = []
        self.slowest_seed = 0
        self.labels: collections.Counter[str] = collections.Counter()
        self.amount = 0

    def add(self, seed: int, outcome: injections.Outcome) -> None:
        self.num_cases += 1
        if max(outcome.notices_s, default=0.0) > max(self.notices_s, default=0.0):
            self.slowest_seed = seed
        self.notices_s += outcome.notices_s
        self.labels[outcome.label] += 1
        self.amount += outcome.amount
        if outcome.complaint:
            self.failing.append(seed)
            print(
                f"{self.name}: seed {seed}: {outcome.complaint[:MAX_TEXT]}\n"
                f"  again: python tests/fuzz/campaign.py {self.name} --seed {seed} --cases 1",
                flush=True,
            )

    def __str__(self) -> str:
        text = f"{self.name}: {self.num_cases} cases, {len(self.failing)} failed"
        if self.amount:
            text += f"; {self.amount} injected"
        if self.notices_s:
            median_ms, worst_ms = 1e3 * np.median(self.notices_s), 1e3 * max(self.notices_s)
            text += f"; {len(self.notices_s)} ranks noticed after {median_ms:.1f} ms (median)"
            text += f", {worst_ms:.1f} ms (worst, seed {self.slowest_seed})"
        counts = ", ".join(f"{label} {n}" for label, n in sorted(self.labels.items()) if label)
        return text + (f"; {counts}" if counts else "")


def run_case(name: str, seed: int) -> injections.Outcome:
    return injections.load(name).run_case(seed)


def run(name: str, cases: int, first_seed: int, jobs: int) -> Tally:
    tally = Tally(name)
    reported_s = time.monotonic()
    seeds = range(first_seed, first_seed + cases)
    # A worker process also for one job: a case that crashes leaves the tally.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for seed, outcome in zip(seeds, pool.map(run_case, [name] * cases, seeds), strict=True):
                tally.add(seed, outcome)
                if time.monotonic() > reported_s + REPORT_EVERY_S:
                    print(tally, flush=True)
                    reported_s = time.monotonic()
        except BaseException:  # Ctrl-C, or a worker that crashed
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            print(tally, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="default: all")
    parser.add_argument("--cases", type=int, help="default: the kind's own number")
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    options = parser.parse_args()
    unknown = set(options.kinds) - set(injections.names())
    if unknown:
        parser.error(f"unknown kind {min(unknown)}: expected {', '.join(injections.names())}")
    num_failed = 0
    for name in options.kinds or injections.names():
        kind = injections.load(name)
        if options.list:
            print(f"{name:12} {kind.CASES:7} cases  {kind.__doc__.splitlines()[0]}")
            continue
        if reason := injections.why_not(kind):
            print(f"{name}: skipped: {reason}")
            continue
        cases = kind.CASES if options.cases is None else options.cases
        num_failed += len(run(name, cases, options.seed, options.jobs).failing)
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
