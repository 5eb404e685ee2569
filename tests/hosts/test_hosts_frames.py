"""Invalid frames of a rank of another host end its connection and nothing else.

tests/fuzz/injections/frames.py sends random ones, and tests/cpp/frame_check.cc many more, to the
same code without a job around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hostile_job import NUM_BYTES, Job, ask_for_parts
from hostile_rank import EAGER, F32, PART, HostileRank, message

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def send_part(hostile: HostileRank, offset: int) -> None:
    ref = (1, ask_for_parts(hostile), 0, offset % 2**64)
    hostile.send("lines", message(PART, 64, lines=2, ref=ref) + b"A" * 64, word=1)


INVALID: dict[str, Callable[[HostileRank], None]] = {
    "slot without a payload": lambda h: h.send("slot", protocol=200, sequence=1),
    "lines without a payload": lambda h: h.send("lines"),
    "message of 2^46 bytes": lambda h: h.send("lines", message(EAGER, 1 << 46, tag=7)),
    "more bytes than lines": lambda h: h.send("lines", message(EAGER, NUM_BYTES, dtype=F32)),
    "part far behind the array": lambda h: send_part(h, 1 << 46),
    "part before the array": lambda h: send_part(h, -64),
    "unknown kind": lambda h: h.send(99),
    "no frame": lambda h: h.send_bytes(b"\xff" * 4096),
}


def named(report: dict[str, Any], rank: int) -> bool:
    """Whether the report is of an error that names this rank, and the memory is as it was."""
    return (
        report.get("error") == "PeerDiedError"
        and report["rank"] == rank
        and f"rank {rank} on host hostile sent an invalid frame" in report["text"]
        and report["guards"]
    )


def test_invalid_frame_ends_its_connection_and_names_the_sender():
    wrong = []
    with contextlib.ExitStack() as stack:
        jobs = {what: stack.enter_context(Job("recv")) for what in INVALID}
        for what, job in jobs.items():
            (report,) = job.attack(INVALID[what])
            wrong += [f"{what}: {report}"] * (not named(report, 1))
    assert not wrong, "\n".join(wrong)


def test_invalid_frame_to_one_rank_is_reported_by_all():
    with Job("all_reduce", size=3) as job:
        reports = job.attack(lambda hostile: hostile.send("lines", peer=1))
    assert all(named(report, 2) for report in reports), reports
