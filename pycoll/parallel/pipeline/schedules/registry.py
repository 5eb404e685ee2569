"""The table of schedules: a generator, and what it promises of bubble and memory.

A row is tested, drawn, listed and run without an edit elsewhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.schedules.actions import Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of one microbatch on one rank: of all its stages together. Any unit.

    Attributes:
        forward: Of F.
        backward_input: Of I.
        backward_weight: Of W; B takes both.
        transfer: From one stage to the next.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        """Of one microbatch, without transfers."""
        return self.forward + self.backward_input + self.backward_weight


Shape = tuple[int, int, int]  # ranks p, microbatches m, stages per rank v


@dataclass(frozen=True, slots=True)
class Generator:
    """A row of the table.

    Attributes:
        name: By which users ask for it.
        make: The schedule of p ranks, m microbatches and v stages per rank.
        bubble: Idle over busy time for such a shape and costs, where the shape is `exact`.
        live: The most microbatches, in chunks of one stage, whose activations a rank holds.
        summary: One line for users.
        source: The paper.
        default_stages: The default of v.
        allowed_stages: What else v may be; empty: any number.
        exact: Whether `bubble` holds for a shape and costs; where not, the simulator says.
        torch_name: Of torch's schedule with the same orders, the oracle of the tests.
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


_generators: dict[str, Generator] = {}


def register(generator: Generator) -> Generator:
    """Adds a row, or replaces the one of that name."""
    _generators[generator.name] = generator
    return generator


def names() -> list[str]:
    """The names of all schedules."""
    return list(_generators)


def generator(name: str) -> Generator:
    """The row of a name: ours or torch's, in upper or lower case.

    Raises:
        UsageError: there is none; the message names similar ones.
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
        name: As `names` lists them, or torch's name.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Of a step; may be fewer than the stages.
        stages_per_rank: None: the schedule's default.

    Returns:
        The schedule: complete, free of deadlock, within its bound of memory.

    Raises:
        UsageError: no such schedule, or it does not take these numbers.

    Cost: about 10 us per action.
    """
    from pycoll.parallel.pipeline.schedules.validate import validate

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


__all__ = ["Costs", "Generator", "build", "generator", "names", "register"]
