"""What the ranks of a training note, and what that says about lost steps, stalls and goodput."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a rank has done.

    Attributes:
        what: "built" for another set of ranks, "committed" a step, or "finished".
        commits: Number of commits of the training so far.
        at_s: When, on CLOCK_MONOTONIC.
        pid: The rank's process.
        rank: Its number among the ranks that are there.
        size: Number of these.
        text: The hash of the weights, for "finished".
    """

    what: str
    commits: int
    at_s: float
    pid: int
    rank: int
    size: int
    text: str = ""

    def to_line(self) -> bytes:
        """The note as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Note:
        """Reads what `to_line` returned."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a training did.

    Attributes:
        commits: Number of its last commit.
        seconds: From its first commit to its last one.
        lost: Committed steps that had to be repeated, the most of any rebuild.
        stalls_s: For each rebuild, seconds between the commits around it, without a step's time.
        digest: Hash of the bits of the weights; empty: it did not end, or ranks differ.
    """

    commits: int
    seconds: float
    lost: int
    stalls_s: list[float]
    digest: str

    def stall_s(self, share: float) -> float:
        """The stall that a share of all stalls does not exceed; 0 if there is none."""
        if not self.stalls_s:
            return 0.0
        return sorted(self.stalls_s)[max(math.ceil(share * len(self.stalls_s)) - 1, 0)]


def summary_of(notes: Sequence[Note]) -> Summary:
    """Summarizes the notes of all ranks."""
    notes = sorted(notes, key=lambda note: note.at_s)
    commits = [note for note in notes if note.what == "committed"]
    if not commits:
        return Summary(0, 0.0, 0, [], "")
    steps_s: list[float] = []
    gaps_s: list[float] = []
    lost = 0
    for pid in {note.pid for note in commits}:
        before, has_rebuilt = None, False
        for note in (note for note in notes if note.pid == pid):
            if note.what == "built" and before is not None:
                lost, has_rebuilt = max(lost, before.commits - note.commits), True
            elif note.what == "committed":
                if before is not None:
                    (gaps_s if has_rebuilt else steps_s).append(note.at_s - before.at_s)
                before, has_rebuilt = note, False
    step_s = statistics.median(steps_s) if steps_s else 0.0
    digests = {note.text for note in notes if note.what == "finished"}
    return Summary(
        commits=max(note.commits for note in commits),
        seconds=commits[-1].at_s - commits[0].at_s,
        lost=lost,
        stalls_s=[max(gap_s - step_s, 0.0) for gap_s in gaps_s],
        digest=digests.pop() if len(digests) == 1 else "",
    )


__all__ = ["Note", "Summary", "summary_of"]
