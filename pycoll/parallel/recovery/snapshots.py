"""Copies of a training's state in the memory of several ranks, and the state from what is left.

Each rank keeps copies of pieces (trainer/training_state.py) of its own, and of pieces that another
rank alone has. Two generations are kept, so that one is whole while the other one is written.

The order within `take` makes a generation that any rank has finished restorable: transfers of the
newest generation end; all ranks meet; then the older one is overwritten. So when a rank overwrites
a generation, all ranks have the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.recovery.copies import Copies
from pycoll.parallel.recovery.pieces import Key
from pycoll.parallel.recovery.restored import Restored, exchanged
from pycoll.parallel.trainer.training_state import Held
from pycoll.work import Work

_EMPTY = -1


@dataclass(slots=True)
class Generation:
    """The copies of one moment.

    Attributes:
        number: Counts the generations of all ranks; -1 before the first one.
        pieces: Flat copies.
        described: What there is beside tensors.
        transfers: Copies that are on their way.
    """

    number: int = _EMPTY
    pieces: dict[Key, Tensor] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    transfers: list[Work] = field(default_factory=list)

    def is_whole(self) -> bool:
        """Whether this rank has all of its copies."""
        over = all(work.done() and work.exception() is None for work in self.transfers)
        return self.number != _EMPTY and over


class Snapshots:
    """The generations of this rank; they outlive the meshes of a training."""

    def __init__(self) -> None:
        self._newest, self._older = Generation(), Generation()

    @property
    def number(self) -> int:
        """Number of the newest generation."""
        return self._newest.number

    def settle(self) -> None:
        """Waits until this rank has all copies of the newest generation.

        Raises:
            Error: A rank has ended.
        """
        for work in self._newest.transfers:
            work.wait()

    def take(
        self, number: int, state: Sequence[Held], described: dict[str, Any], copies: Copies
    ) -> None:
        """Copies the state, and starts to send what other ranks shall have.

        All ranks have settled the newest generation before, and have met since.

        Args:
            number: The number of this generation, identical on all ranks.
            state: What this rank holds.
            described: What there is beside tensors.
            copies: Which rank copies what.
        """
        generation = self._older
        free, generation.number = generation.pieces, _EMPTY
        generation.pieces, generation.transfers = copies.exchange(state)
        for held in state:
            key = held.name, held.place
            if copies.keeps(held.of) and key not in generation.pieces:
                generation.pieces[key] = _copied(held.flat, free.pop(key, None))
        generation.described = described
        generation.number = number
        self._newest, self._older = generation, self._newest

    def restore(self, comm: Communicator, needed: set[str]) -> Restored | None:
        """Finds the newest state that the ranks have whole, and puts it together. Collective.

        Args:
            comm: The ranks that are left, and newcomers.
            needed: Names of the parameters and buffers (`Held.of`) that this rank needs.

        Returns:
            The state; None: the ranks have too few of its copies.

        Cost: each piece is sent to all ranks; memory of all the tensors that this rank needs.
        """
        own = {one.number: one for one in (self._newest, self._older) if one.is_whole()}
        numbers = [set(of_rank) for of_rank in gather_objects(sorted(own), comm) if of_rank]
        for number in sorted(set.intersection(*numbers), reverse=True) if numbers else ():
            mine = own.get(number, Generation())
            pieces = exchanged(comm, mine.pieces, needed)
            if pieces is not None:
                described = next(filter(None, gather_objects(mine.described, comm)))
                return Restored(number, described, pieces)
        return None


def _copied(flat: Tensor, free: Tensor | None) -> Tensor:
    if free is None:
        return flat.to("cpu", copy=True)
    return free.copy_(flat)


__all__ = ["Generation", "Snapshots"]
