"""Actions of a rank in a pipeline, named as in torch's pipelining, and schedules made of them.

Invariant: a schedule is data. It gives each rank's actions and their order, but no times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from pycoll.errors import UsageError


class Kind(str, Enum):
    """Kinds of actions; the values equal torch's, except U.

    B computes the gradients of inputs and weights; I computes those of the inputs, and W later
    those of the weights. U updates a stage's weights, in schedules without a flush only.
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

    __hash__ = str.__hash__  # faster than Enum's, which is a Python function

    @property
    def is_compute(self) -> bool:
        return len(self.value) == 1


_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W|U)(\d+)")


class Action(NamedTuple):
    """One action: `2F0` is the forward of stage 2 for microbatch 0.

    A transfer names the stage on its own side: `1SEND_F0` goes to stage 2, as `2RECV_F0` there.
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
            UsageError: The text is no action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not an action: expected for example 2F0, 0B3 or 1SEND_F7"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each rank, in order.

    Attributes:
        name: Name of the generator.
        num_microbatches: Number of microbatches of a step.
        placement: The rank of each stage; the first one, if it has replicas.
        orders: The actions of each rank.
        replicas: Number of consecutive ranks that take turns at the microbatches of each stage;
            empty: every stage has one rank.
        per_update: Number of microbatches of a rank whose gradients one update takes.
        versions: The number of updates in the weights that each microbatch uses, in every stage;
            empty: the weights that a stage has at the microbatch's forward.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    replicas: tuple[int, ...] = ()
    per_update: int = 1
    versions: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def stages_per_rank(self) -> int:
        return max(1, self.num_stages // self.num_ranks)

    @property
    def updates(self) -> bool:
        """Whether the schedule updates weights within a step, so that it has no flush."""
        return any(action.kind is Kind.U for order in self.orders for action in order)

    @property
    def splits_backward(self) -> bool:
        """Whether backward is split into I and W."""
        return any(action.kind is Kind.W for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in model order."""
        return tuple(s for s in range(self.num_stages) if rank in self.ranks_of(s))

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage."""
        first = self.placement[stage]
        return range(first, first + (self.replicas[stage] if self.replicas else 1))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank of a microbatch in a stage: its replicas take turns."""
        ranks = self.ranks_of(stage)
        return ranks[microbatch % len(ranks)]

    def round_of(self, stage: int, microbatch: int) -> range:
        """The microbatches of the update of a stage that has the gradients of one of them."""
        num = len(self.ranks_of(stage)) * self.per_update
        first = microbatch // num * num
        return range(first, min(first + num, self.num_microbatches))

    def ends_round(self, stage: int, microbatch: int) -> bool:
        """Whether a microbatch is the last one of its rank before an update of a stage."""
        return microbatch + len(self.ranks_of(stage)) >= self.round_of(stage, microbatch).stop

    def without(self, *kinds: Kind) -> Schedule:
        """Returns the schedule without some kinds of actions."""
        orders = tuple(tuple(a for a in order if a.kind not in kinds) for order in self.orders)
        return replace(self, orders=orders)

    def text(self) -> str:
        """One line per rank: `0: 0F0 0F1 0B0 0B1`. `from_text` reads this format.

        A schedule whose updates have several microbatches ends with `per_update: 2`; one with
        versions, with `versions: 0 0 1`.
        """
        lines = [f"{r}: {' '.join(map(str, order))}" for r, order in enumerate(self.orders)]
        if self.per_update > 1:
            lines.append(f"per_update: {self.per_update}")
        if self.versions:
            lines.append(f"versions: {' '.join(map(str, self.versions))}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> Schedule:
        """Reads a schedule from text, written by hand or by `text`.

        Args:
            text: One line of actions per rank, in rank order; a prefix such as `0:` is optional.
                Lines `per_update:` and `versions:` with numbers may follow.
            name: Name for error messages.

        Returns:
            The schedule, not validated yet.

        Raises:
            UsageError: A word is not an action, or no rank has a required stage.
        """
        orders: list[list[Action]] = []
        numbers: dict[str, list[int]] = {"per_update": [1], "versions": []}
        for line in filter(str.strip, text.splitlines()):
            head, _, rest = line.partition(":")
            words = (rest or line).split()
            if head.strip() not in numbers:
                orders.append([Action.parse(word) for word in words])
            elif all(map(str.isdecimal, words)):
                numbers[head.strip()] = [int(word) for word in words]
            else:
                raise UsageError(f"schedule {name}: {line.strip()!r}: expected numbers from 0 up")
        made = cls.from_orders(name, orders)
        (per_update, *more), versions = numbers["per_update"], tuple(numbers["versions"])
        if more or per_update < 1 or len(versions) not in (0, made.num_microbatches):
            raise UsageError(
                f"schedule {name}: per_update {numbers['per_update']} and {len(versions)} versions "
                f"for {made.num_microbatches} microbatches; expected one number from 1 up, and "
                "none or one version for each"
            )
        return replace(made, per_update=per_update, versions=versions)

    @classmethod
    def from_orders(cls, name: str, orders: Iterable[Iterable[Action]]) -> Schedule:
        """Makes a schedule from orders, which determine placement and number of microbatches.

        Raises:
            UsageError: A stage is on two ranks, or on none.
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
    """Yields all actions with their rank, rank by rank."""
    for rank, order in enumerate(orders):
        for action in order:
            yield rank, action


def interleaved_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Places stage s on rank s mod p, in a loop."""
    return tuple(range(num_ranks)) * stages_per_rank


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Places two stages per rank, down and up again: rank 0 has the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of one microbatch in all stages of one rank, in any unit.

    Attributes:
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W; B takes the time of both I and W.
        transfer: Time from one stage to the next.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        """Time of one microbatch, without transfers."""
        return self.forward + self.backward_input + self.backward_weight


Shape = tuple[int, int, int]  # ranks p, microbatches m, stages per rank v


__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "each_action",
    "interleaved_placement",
    "v_placement",
]
