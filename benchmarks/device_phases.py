"""How often the threads of a block meet in an algorithm, counted in its lowered programs.

python benchmarks/device_phases.py prints the table of docs/cuda.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pycoll import _core, schedule

NUM_RANKS = 8
MAX_PHASE_STEPS = 32  # kMaxPhaseSteps: a block shares the operands of as many steps
PHASE_BARRIERS = 2  # in `simple`: before bytes move, and before flags are set


@dataclass(frozen=True, slots=True)
class Meetings:
    """Counts in one tile, each of the rank that has most.

    barriers are those of `simple`. fences are flags that are set one after another: a phase sets
    those of all of its destinations at once, and those of all of its sources. rounds is the length
    of the longest chain of messages in which each one is sent after the one before it has arrived.
    """

    phases: int
    barriers: int
    fences: int
    rounds: int


def starts(program: Any) -> list[int]:
    """The first step of each phase, and one past the last step."""
    first = [i for i, step in enumerate(program.steps) if not step.same_phase]
    return [*first, len(program.steps)]


def num_shares(program: Any) -> int:
    """How often a block shares operands: of as many whole phases as there is room for."""
    num = first = 0
    for begin, end in pairwise(starts(program)):
        if num == 0 or end - first > MAX_PHASE_STEPS:
            num, first = num + 1, begin
    return num


def num_fences(program: Any) -> int:
    """Flags of destinations and flags of sources, phase by phase."""
    num = 0
    for begin, end in pairwise(starts(program)):
        steps = program.steps[begin:end]
        num += any(step.dst_peers for step in steps) + any(step.src_peers for step in steps)
    return num


def num_rounds(programs: list[Any]) -> int:
    """Executes all phases, with links of any length, and counts the messages behind each other."""
    links: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    phases = [deque(pairwise(starts(program))) for program in programs]
    reached = [0] * len(programs)

    def run(rank: int) -> bool:
        begin, end = phases[rank][0]
        steps = programs[rank].steps[begin:end]
        sources = [(src, rank) for step in steps for src in step.src_peers]
        if not all(links[source] for source in sources):
            return False
        reached[rank] = max([reached[rank], *(links[source].popleft() for source in sources)])
        for dst in (dst for step in steps for dst in step.dst_peers):
            links[rank, dst].append(reached[rank] + 1)
        phases[rank].popleft()
        return True

    while any(phases):
        assert any([phases[rank] and run(rank) for rank in range(len(programs))]), "deadlock"
    return max(reached)


def meetings(collective: str, algorithm: str, n: int, phases: bool = True) -> Meetings:
    """Counts them.

    Args:
        collective: Its name.
        algorithm: A name without its protocol.
        n: Number of ranks.
        phases: Whether a block runs phases. Otherwise it runs the steps one after another, and
            each thread computes the operands, so that there is no barrier behind them.

    Returns:
        The largest numbers of any rank.
    """
    programs = schedule.build(collective, algorithm, n).programs(multicast=False, phases=phases)
    barriers = [
        PHASE_BARRIERS * (len(starts(program)) - 1) + (num_shares(program) if phases else 0)
        for program in programs
    ]
    return Meetings(
        max(len(starts(program)) - 1 for program in programs),
        max(barriers),
        max(map(num_fences, programs)),
        num_rounds(programs),
    )


def table() -> str:
    """The table of all algorithms, in Markdown: step by step, and in phases."""
    heads = ["collective", "algorithm", "steps", "phases", "barriers", "fences", "rounds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in _core.algorithms():
        before = meetings(row.collective, row.name, NUM_RANKS, phases=False)
        after = meetings(row.collective, row.name, NUM_RANKS)
        cells = [
            *(row.collective, f"`{row.name}`", str(before.phases), str(after.phases)),
            f"{before.barriers} → {after.barriers}",
            f"{before.fences} → {after.fences}",
            f"{before.rounds} → {after.rounds}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
