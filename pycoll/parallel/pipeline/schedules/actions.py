"""What a rank does in a pipeline, in the words of torch's pipelining, and a schedule made of it.

Invariant: a schedule is data. It says what each rank does and in which order, and never when.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pycoll.errors import UsageError


class Kind(str, Enum):
    """The kinds of actions; the values are torch's, but for U.

    B computes the gradients of inputs and weights; I of the inputs alone, and W of the weights
    later. U updates the weights of a stage: only schedules without a flush have it.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    U = "U"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = str.__hash__  # Enum's is a Python function, and actions are keys everywhere

    @property
    def is_compute(self) -> bool:
        return len(self.value) == 1


_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W|U)(\d+)")


class Action(NamedTuple):
    """One action: `2F0` is the forward of stage 2 for microbatch 0.

    A transfer names the stage on its own side: `1SEND_F0` goes to stage 2, where it is `2RECV_F0`.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads `2F0`.

        Raises:
            UsageError: it is no action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is no action: expected one such as 2F0, 0B3 or 1SEND_F7")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank does, in order.

    Attributes:
        name: Of the generator.
        num_microbatches: How many a step has.
        placement: The rank of each stage.
        orders: The actions of each rank.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    @property
    def updates(self) -> bool:
        """True of a schedule that updates weights within a step: it has no flush."""
        return any(action.kind is Kind.U for order in self.orders for action in order)

    @property
    def splits_backward(self) -> bool:
        """True where I and W are apart."""
        return any(action.kind is Kind.W for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the model's order."""
        return tuple(stage for stage, of in enumerate(self.placement) if of == rank)

    def without(self, *kinds: Kind) -> Schedule:
        """The same schedule, some kinds of actions left out."""
        orders = tuple(tuple(a for a in order if a.kind not in kinds) for order in self.orders)
        return Schedule(self.name, self.num_microbatches, self.placement, orders)

    def text(self) -> str:
        """A line for each rank: `0: 0F0 0F1 0B0 0B1`. `from_text` reads it."""
        lines = (f"{r}: {' '.join(map(str, order))}" for r, order in enumerate(self.orders))
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> Schedule:
        """Reads a schedule that somebody has written by hand, or `text` has.

        Args:
            text: A line of actions for each rank, in rank order; `0:` before them is optional.
            name: What errors call it.

        Returns:
            The schedule, not validated yet.

        Raises:
            UsageError: something in it is no action, or no rank has a stage that is needed.
        """
        lines = [line.partition(":")[2] or line for line in text.splitlines() if line.strip()]
        orders = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
        return cls.from_orders(name, orders)

    @classmethod
    def from_orders(cls, name: str, orders: Iterable[Iterable[Action]]) -> Schedule:
        """A schedule of orders alone: they say where stages are and how many microbatches.

        Raises:
            UsageError: a stage is on two ranks, or on none.
        """
        ranks = tuple(tuple(order) for order in orders)
        where: dict[int, int] = {}
        for rank, action in each_action(ranks):
            if where.setdefault(action.stage, rank) != rank:
                raise UsageError(
                    f"schedule {name}: stage {action.stage} is on rank {where[action.stage]} and, "
                    f"in {action}, on rank {rank}; expected one rank for each stage"
                )
        missing = sorted(set(range(max(where, default=-1) + 1)) - where.keys())
        if missing or not where:
            raise UsageError(f"schedule {name}: no rank has an action of stage {missing or [0]}")
        microbatches = 1 + max(action.microbatch for _, action in each_action(ranks))
        return cls(name, microbatches, tuple(where[s] for s in range(len(where))), ranks)


def each_action(orders: Iterable[Iterable[Action]]) -> Iterator[tuple[int, Action]]:
    """All actions with their rank, rank after rank."""
    for rank, order in enumerate(orders):
        for action in order:
            yield rank, action


def interleaved_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s is on rank s mod p: the loop."""
    return tuple(range(num_ranks)) * stages_per_rank


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: rank 0 has the first stage and the last one."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "each_action",
    "interleaved_placement",
    "v_placement",
]
