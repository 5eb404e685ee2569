"""Which samples and which step pass through the model: what keyed by place looks up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Position:
    """The samples and the step that pass through the model.

    Attributes:
        step: Number of the step.
        first_sample: Place of the microbatch's first sample in the batch of all replicas.
        num_samples: Number of samples in the microbatch.
        sequence: Length of the sequence while this rank's share of it passes; 0: it passes whole.
    """

    step: int = 0
    first_sample: int = 0
    num_samples: int = 1
    sequence: int = 0


class Positions:
    """The position that dropout layers look up.

    Attributes:
        seed: Seed of all masks.
        now: The current position.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.now = Position()

    def move(self, **changes: int) -> None:
        """Changes fields of the current position."""
        self.now = replace(self.now, **changes)

    @contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """Sets another position for a while, such as that of a forward pass that runs again."""
        self.now, before = position, self.now
        try:
            yield
        finally:
            self.now = before


__all__ = ["Position", "Positions"]
