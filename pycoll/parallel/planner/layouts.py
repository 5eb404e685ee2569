"""Layouts: how a step may be spread over ranks, and all of them for a number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.core.mesh_sizes import AXES


@dataclass(frozen=True, slots=True)
class Layout:
    """Arguments of `mesh`, `parallelize` and `step` that decide what a step costs.

    Attributes:
        pp, dp, ep, cp, tp: Sizes of the axes.
        microbatches: Number of microbatches of a step, for each replica.
        zero: ZeRO level.
        schedule: Name of the pipeline schedule.
        recompute: None, or "full" for the blocks.
        sequence_parallel: Whether tp also shares out the activations between its layers.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    microbatches: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    recompute: str | None = None
    sequence_parallel: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes, by name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """Number of replicas, which have distinct samples."""
        return self.dp * self.ep

    @property
    def family(self) -> str:
        """The axes that have several ranks: what kind of parallelism this is."""
        axes = [axis for axis in ("dp", "ep", "cp", "tp", "pp") if getattr(self, axis) > 1]
        return " x ".join(axes or ["one rank"])

    def __str__(self) -> str:
        axes = ",".join(f"{axis}={n}" for axis, n in self.sizes.items() if n > 1) or "dp=1"
        parts = [axes, f"m={self.microbatches}"]
        parts += [f"zero={self.zero}"] if self.zero else []
        parts += [self.schedule] if self.pp > 1 else []
        parts += ["recompute"] if self.recompute else []
        parts += ["sp"] if self.sequence_parallel else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a plan chooses from.

    Attributes:
        zero: ZeRO levels.
        schedules: Names of pipeline schedules.
        recompute: None, or "full".
        sequence_parallel: Whether tp may also share out the activations between its layers.
        axes: Axes that may have several ranks.
        tp_sizes: Sizes of tp; None: all up to the ranks of a host.
        largest_microbatch: Most samples of a microbatch.
    """

    zero: tuple[int, ...] = (0, 1, 3)
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b")
    recompute: tuple[str | None, ...] = (None, "full")
    sequence_parallel: tuple[bool, ...] = (False, True)
    axes: tuple[str, ...] = ("dp", "tp", "pp", "cp")
    tp_sizes: tuple[int, ...] | None = None
    largest_microbatch: int = 8

    def __post_init__(self) -> None:
        unknown = set(self.axes) - set(AXES)
        if unknown:
            raise UsageError(f"plan: axes are {self.axes}, expected some of {', '.join(AXES)}")


def divisors(n: int) -> list[int]:
    """The divisors of a number, in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def factorizations(world: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """All sizes of some axes whose product is a number of ranks."""
    if not axes:
        if world == 1:
            yield {}
        return
    for size in divisors(world):
        for rest in factorizations(world // size, axes[1:]):
            yield {axes[0]: size, **rest}


def all_layouts(
    world: int, batch: int, num_blocks: int, ranks_per_host: int, choices: Choices
) -> Iterator[Layout]:
    """All layouts of a number of ranks that a batch and a list of blocks allow.

    Args:
        world: Number of ranks.
        batch: Number of samples of a step.
        num_blocks: Number of blocks that pp can cut.
        ranks_per_host: Most ranks of tp, if `choices` does not say its sizes.
        choices: What to choose from.

    Yields:
        The layouts, without those that differ in an option that has no effect.
    """
    tp_sizes = choices.tp_sizes or range(1, ranks_per_host + 1)
    for sizes in factorizations(world, choices.axes):
        mesh = Layout(**cast(dict[str, Any], sizes))
        if mesh.tp not in tp_sizes or batch % mesh.replicas or mesh.pp > max(num_blocks, 1):
            continue
        for of_replica in divisors(min(choices.largest_microbatch, batch // mesh.replicas)):
            if batch // mesh.replicas % of_replica:
                continue
            m = batch // mesh.replicas // of_replica
            yield from _with_options(replace(mesh, microbatches=m), num_blocks, choices)


def _with_options(mesh: Layout, num_blocks: int, choices: Choices) -> Iterator[Layout]:
    shards = mesh.dp * mesh.ep * mesh.cp > 1
    zeros = [level for level in choices.zero if shards or level == 0] or [0]
    schedules = choices.schedules if mesh.pp > 1 else ("1f1b",)
    recompute = choices.recompute if num_blocks else (None,)
    sequence = choices.sequence_parallel if mesh.tp > 1 and num_blocks else (False,)
    for zero, schedule, again, shared in itertools.product(zeros, schedules, recompute, sequence):
        layout = replace(
            mesh, zero=zero, schedule=schedule, recompute=again, sequence_parallel=shared
        )
        stages = pipeline.generator(schedule).default_stages if mesh.pp > 1 else 1
        if mesh.pp * stages <= max(num_blocks, 1):
            yield layout


__all__ = ["Choices", "Layout", "all_layouts", "divisors", "factorizations"]
