"""The table of schedules: generators with their promised bubble and memory.

A new row is tested, drawn, listed and run without an edit elsewhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Costs, Schedule
from pycoll.parallel.pipeline.schedules.validate import validate


@dataclass(frozen=True, slots=True)
class Generator:
    """A row of the table.

    Attributes:
        name: Name by which users select the schedule.
        make: The schedule of p ranks, m microbatches and v stages per rank.
        bubble: Idle over busy time for a shape and costs, if `exact` holds.
        live: The most microbatches, in chunks of one stage, whose activations a rank holds.
        summary: One-line description for users.
        source: The paper.
        default_stages: Default of v.
        allowed_stages: Other allowed values of v; empty: any number.
        exact: Whether `bubble` is exact for a shape and costs; if not, simulate.
        torch_name: Name of torch's schedule with the same orders, the reference in tests.
        staleness: Of p, a stage and a microbatch: the updates in a stage's weights at the backward
            that the weights of the forward lack. None: the schedule has a flush.
    """

    name: str
    make: Callable[[int, int, int], Schedule]
    bubble: Callable[[int, int, int, Costs], float]
    live: Callable[[int, int, int, int], int]
    summary: str
    source: str
    default_stages: int = 1
    allowed_stages: tuple[int, ...] = ()
    exact: Callable[[int, int, int, Costs], bool] = lambda p, m, v, costs: True
    torch_name: str | None = None
    staleness: Callable[[int, int, int], int] | None = None


_generators: dict[str, Generator] = {}


def register(generator: Generator) -> Generator:
    """Adds a row, or replaces the row with its name."""
    _generators[generator.name] = generator
    return generator


def names() -> list[str]:
    """The names of all schedules."""
    return list(_generators)


def generator(name: str) -> Generator:
    """Finds a row by its name or torch's name, in upper or lower case.

    Raises:
        UsageError: There is no such row; the message suggests a similar name.
    """
    wanted = name.lower().replace("-", "_")
    for row in _generators.values():
        if wanted in (row.name, (row.torch_name or row.name).lower()):
            return row
    near = difflib.get_close_matches(wanted, _generators, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"no schedule {name!r}: expected one of {', '.join(_generators)}{hint}")


def build(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Makes a schedule and validates it.

    Args:
        name: A name from `names`, or torch's name.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step; may be fewer than the stages.
        stages_per_rank: Number of stages per rank; None: the schedule's default.

    Returns:
        The schedule: complete, free of deadlock, within its memory bound.

    Raises:
        UsageError: There is no such schedule, or it does not support these numbers.

    Cost: about 10 us per action.
    """
    row = generator(name)
    v = row.default_stages if stages_per_rank is None else stages_per_rank
    if num_ranks < 1 or num_microbatches < 1 or v < 1:
        raise UsageError(
            f"schedule {row.name}: {num_ranks} ranks, {num_microbatches} microbatches, "
            f"{v} stages per rank; expected 1 or more of each"
        )
    if row.allowed_stages and v not in row.allowed_stages:
        allowed = " or ".join(map(str, row.allowed_stages))
        raise UsageError(f"schedule {row.name} has {allowed} stages per rank, got {v}")
    schedule = row.make(num_ranks, num_microbatches, v)
    bounds = [row.live(num_ranks, num_microbatches, v, rank) for rank in range(num_ranks)]
    validate(schedule, max_live=bounds)
    return schedule


__all__ = ["Generator", "build", "generator", "names", "register"]
