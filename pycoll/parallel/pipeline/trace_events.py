"""Timelines of pipeline steps: each rank's actions, as tracks of one trace with collectives.

Files are named `pipeline-GROUP-rank_N.json`, next to the flight records; `pycoll trace` reads both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.errors import UsageError
from pycoll.observe import flight
from pycoll.parallel.pipeline.schedules.actions import Action, Kind

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.parallel.pipeline.step import Moment

PREFIX = "pipeline-"
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward of inputs",
    Kind.W: "backward of weights",
    Kind.U: "update",
}


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a rank, or its wait for input, in nanoseconds since 1970."""

    action: Action
    start_ns: int
    end_ns: int
    waited: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one rank of one pipeline."""

    group: str
    rank: int
    schedule: str
    steps: tuple[tuple[Span, ...], ...]


def write(
    steps: Iterable[Sequence[Moment]],
    schedule: str,
    comm: Communicator,
    folder: str | Path,
    also: Sequence[Communicator] = (),
) -> list[Path]:
    """Writes the timeline of this rank, and the flight records of communicators.

    Args:
        steps: Actions of the rank in each step.
        schedule: Name of the schedule.
        comm: Communicator of the pipeline.
        folder: Output folder; created if missing.
        also: Other communicators, such as those of replicas.

    Returns:
        The written files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    group = comm._group()["name"]
    to_unix_ns = time.time_ns() - time.monotonic_ns()
    content = {
        "pycoll_pipeline": 1,
        "group": group,
        "rank": comm.rank,
        "schedule": schedule,
        "steps": [
            [
                [str(m.action), m.start_ns + to_unix_ns, m.end_ns + to_unix_ns, m.waited]
                for m in step
            ]
            for step in steps
        ],
    }
    path = folder / f"{PREFIX}{group}-rank_{comm.rank}.json"
    path.write_text(json.dumps(content) + "\n")
    paths = [path]
    for other in (comm, *also):
        source = flight.CommunicatorSource(other)
        paths += flight.write(source, [other.rank], folder, timeout_s=other.timeout_s)
    return paths


def read(paths: Iterable[Path]) -> list[Timeline]:
    """Reads timelines from files, and from timeline files in folders.

    Raises:
        UsageError: A file is not a timeline.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.glob(f"{PREFIX}*.json"))
        elif path.name.startswith(PREFIX):
            files.append(path)
    found = []
    for path in files:
        try:
            content = json.loads(path.read_text())
            steps = tuple(
                tuple(Span(Action.parse(a), start, end, waited) for a, start, end, waited in step)
                for step in content["steps"]
            )
            found.append(Timeline(content["group"], content["rank"], content["schedule"], steps))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a pipeline timeline: {error!r}") from error
    return sorted(found, key=lambda timeline: (timeline.group, timeline.rank))


def bounds(timelines: Iterable[Timeline]) -> list[int]:
    """Start times of all steps, in nanoseconds."""
    return [step[0].start_ns for timeline in timelines for step in timeline.steps if step]


def events(
    timelines: Sequence[Timeline], first_pid: int, at_us: Callable[[int], float]
) -> list[dict[str, Any]]:
    """Trace Events: a process per pipeline, with a track of compute and bubbles per rank.

    Arrows are transfers, from the producing action to the reading one; a counter shows the number
    of microbatches whose activations a rank holds.

    Args:
        timelines: Timelines of any number of pipelines.
        first_pid: First free process id.
        at_us: Converts nanoseconds since 1970 to the trace's microseconds.

    Returns:
        The trace events.
    """
    made: list[dict[str, Any]] = []
    groups = sorted({timeline.group for timeline in timelines})
    for pid, group in enumerate(groups, first_pid):
        ranks = [timeline for timeline in timelines if timeline.group == group]
        name = f"pipeline {ranks[0].schedule} on communicator {group}"
        made.append(_named("process_name", pid, 0, name))
        for timeline in ranks:
            made.append(_named("thread_name", pid, timeline.rank, f"rank {timeline.rank}"))
            for number, step in enumerate(timeline.steps):
                made += _step(pid, timeline.rank, number, step, at_us)
        made += _transfers(pid, ranks, at_us)
    return made


def _step(
    pid: int, rank: int, number: int, step: Sequence[Span], at_us: Callable[[int], float]
) -> list[dict[str, Any]]:
    common = {"pid": pid, "tid": rank}
    made: list[dict[str, Any]] = []
    end_ns, live = None, 0
    reads = {span.action for span in step if span.waited}
    for span in (span for span in step if not span.waited):
        action, start = span.action, at_us(span.start_ns)
        if end_ns is not None and span.start_ns > end_ns:
            waits = {"waits_for": str(action)} if action in reads else {}
            gap = {"name": "bubble", "cat": "bubble", "ph": "X", "ts": at_us(end_ns)}
            made.append({**common, **gap, "dur": start - at_us(end_ns), "args": waits})
        end_ns = span.end_ns
        args = {"step": number, "stage": action.stage, "microbatch": action.microbatch}
        made.append(
            {
                **common,
                "name": f"{_NAMES[action.kind]} {action.microbatch}",
                "cat": "compute",
                "ph": "X",
                "ts": start,
                "dur": at_us(span.end_ns) - start,
                "args": args | {"action": str(action)},
            }
        )
        change = (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        if change:
            live += change
            counter = {"ph": "C", "name": f"live activations, rank {rank}", "pid": pid}
            made.append({**counter, "ts": at_us(span.end_ns), "args": {"microbatches": live}})
    return made


def _transfers(
    pid: int, ranks: Sequence[Timeline], at_us: Callable[[int], float]
) -> list[dict[str, Any]]:
    """An arrow for each wait for another rank's action, if that rank's timeline is given."""
    done: dict[tuple[int, Action], tuple[int, Span]] = {}
    for timeline in ranks:
        for number, step in enumerate(timeline.steps):
            for span in step:
                if not span.waited:
                    done[number, span.action] = timeline.rank, span
    made = []
    for timeline in ranks:
        for number, step in enumerate(timeline.steps):
            for span in (span for span in step if span.waited):
                stage, kind, i = span.action
                wanted = [Action(stage - 1, kind, i)] if kind is Kind.F else []
                if kind is not Kind.F:
                    wanted = [Action(stage + 1, of, i) for of in (Kind.B, Kind.I)]
                maker = next((done[number, a] for a in wanted if (number, a) in done), None)
                reader = done.get((number, span.action))
                if maker is None or reader is None:
                    continue
                arrow = {"name": "transfer", "cat": "transfer", "pid": pid}
                arrow["id"] = f"{pid}.{number}.{span.action}"
                start = {"ph": "s", "tid": maker[0], "ts": at_us(maker[1].end_ns)}
                end = {"ph": "f", "bp": "e", "tid": timeline.rank}
                made.append({**arrow, **start})
                made.append({**arrow, **end, "ts": at_us(reader[1].start_ns)})
    return made


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


__all__ = ["Span", "Timeline", "bounds", "events", "read", "write"]
