"""A rank of another host sends random frames to a live job: its link may end, and nothing else.

No rank crashes or hangs, no byte outside the receives that are pending changes, and an error names
the hostile rank.
"""

from __future__ import annotations

import random

from hostile_job import Job, complaint_about, frames
from hostile_rank import HostileRank

from injections import Outcome

CASES = 300
FEW = range(1, 13)
_MOST_FRAMES = 200
_CALLS = ("mixed", "mixed", "mixed", "recv", "all_reduce")


def run_case(seed: int) -> Outcome:
    num_frames = 0

    def attack(hostile: HostileRank) -> None:
        nonlocal num_frames
        for _ in frames(seed, _MOST_FRAMES)(hostile):
            num_frames += 1

    call = random.Random(seed).choice(_CALLS)
    with Job(call) as job:
        (report,) = job.attack(attack)
    return Outcome(complaint_about(report, 1), label=report.get("error", ""), amount=num_frames)
