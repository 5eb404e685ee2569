"""The cable of one of three hosts of an elastic training is pulled, for a moment or for long.

A moment changes nothing. After a long one the two hosts that still reach each other go on, and the
ranks of the third raise an error that says so. When the cable is back, they are started again and
join. In both cases the weights have the bits of a training that nothing disturbed.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import namespaces
import torch._dynamo  # noqa: F401 - the first optimizer imports it, for seconds; ranks are forks
from driving import drawn
from faults import left_over, resources
from host_trainings import Trained, Training, has_bits, undisturbed
from hypothesis import strategies as st

from injections import Outcome
from injections.partitions import NUM_HOSTS, network

CASES = 50
FEW = (1, 2)  # for a moment, and for long
SILENCE_S = 1.5
STEP_S = 0.005

why_not = namespaces.why_not


@dataclass(frozen=True)
class Partition:
    per_host: int
    host: int  # whose cable is pulled
    at_commit: int
    heals_after_s: float  # 0: when its ranks have ended
    zero: int

    def training(self) -> Training:
        """After a long partition, rank 0 waits near the end for the ranks that join again."""
        waits_at = 0 if self.heals_after_s else 50
        return Training(60, STEP_S, self.zero, NUM_HOSTS * self.per_host, waits_at)


def cases() -> st.SearchStrategy[Partition]:
    return st.builds(
        Partition,
        per_host=st.integers(1, 2),
        host=st.integers(0, NUM_HOSTS - 1),
        at_commit=st.integers(1, 40),
        heals_after_s=st.sampled_from([0.0, 0.05, 0.2]),
        zero=st.sampled_from([0, 1, 3]),
    )


@functools.cache
def expected(zero: int) -> dict[str, Any]:
    """The weights of a training that nothing disturbs."""
    return undisturbed(network(), Partition(1, 0, 0, 1.0, zero).training())


def run(case: Partition) -> str:
    """What is wrong; empty: nothing."""
    hosts = network()
    places = [rank // case.per_host for rank in range(NUM_HOSTS * case.per_host)]
    trained = Trained(hosts, case.training(), places, SILENCE_S)
    trained.wait_for_commit(case.at_commit)
    hosts.set_link(case.host, False)
    try:
        if case.heals_after_s:
            time.sleep(case.heals_after_s)
        else:
            first = case.host * case.per_host
            isolated = hosts.outcomes(trained.ranks[first : first + case.per_host])
            del trained.ranks[first : first + case.per_host]
    finally:
        hosts.set_link(case.host, True)
    if not case.heals_after_s:
        for seen in isolated:
            if seen.error != "PeerDiedError" or "may go on elsewhere" not in seen.text:
                return f"a rank without a cable: {seen}"
            trained.add(case.host)
    for rank, seen in enumerate(trained.outcomes()):
        if not has_bits(seen, expected(case.zero)):
            return f"rank {rank}: {seen.error} {seen.text or 'other weights'}"
    return ""


def run_case(seed: int) -> Outcome:
    case = drawn(cases(), seed)
    expected(case.zero)
    before = resources()
    complaint = run(case) or left_over(before)
    label = "for a moment" if case.heals_after_s else "for long"
    return Outcome(f"{complaint}\n{case}" if complaint else "", label=label)
