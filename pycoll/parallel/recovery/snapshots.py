"""A training's state in the memory of several ranks, and the state from what is left.

Each rank keeps copies of pieces (trainer/training_state.py) of its own, and of pieces that another
rank alone has. Two generations are kept, so that one is whole while the other one is written.

The order within `take` makes a generation that any rank has finished restorable: transfers of the
newest generation end; all ranks meet; then the older one is overwritten. So when a rank overwrites
a generation, all ranks have the next one.

A rank that has the whole state may `hold` it instead: the generation is then the state in use, and
nothing is copied but buffers, which forward passes change. It ends when the optimizer changes the
state, and until the next `hold` nothing must wait for other ranks (decision 0093).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.errors import Error
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.recovery.copies import Copies
from pycoll.parallel.recovery.pieces import Key, copied, listed
from pycoll.parallel.recovery.restored import Restored, exchanged
from pycoll.parallel.trainer.training_state import Held
from pycoll.work import Work

_EMPTY = -1

State = Callable[[], Sequence[Held]]


@dataclass(slots=True)
class Generation:
    """The state at one moment.

    Attributes:
        number: Counts the generations of all ranks; -1: there is none.
        pieces: Flat copies.
        described: What there is beside tensors.
        transfers: Copies that are on their way.
        in_use: Returns the rest of the state, which is in use; None: all are copies.
        is_alone: This rank has the whole state.
    """

    number: int = _EMPTY
    pieces: dict[Key, Tensor] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    transfers: list[Work] = field(default_factory=list)
    in_use: State | None = None
    is_alone: bool = False

    def is_whole(self) -> bool:
        """Whether this rank has all of its copies."""
        over = all(work.done() and work.exception() is None for work in self.transfers)
        return self.number != _EMPTY and over

    def all_pieces(self) -> dict[Key, Tensor]:
        """Copies, and pieces in use."""
        used = () if self.in_use is None else self.in_use()
        return {(held.name, held.place): held.flat for held in used} | self.pieces


class Snapshots:
    """The generations of this rank; they outlive the meshes of a training.

    Attributes:
        number: Number of the newest generation, also if it has ended; -1 before the first one.
        holds: Whether the newest generation was held rather than copied.
    """

    def __init__(self) -> None:
        self._newest, self._older = Generation(), Generation()
        self.number, self.holds = _EMPTY, False

    @property
    def is_in_use(self) -> bool:
        """Whether the newest generation is in use: it ends with the optimizer's next step."""
        return self._newest.in_use is not None

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
        generation = self._older if self._older.in_use is None else Generation()
        free, generation.number = generation.pieces, _EMPTY
        generation.pieces, generation.transfers = copies.exchange(state)
        for held in state:
            key = held.name, held.place
            if copies.keeps(held.of) and key not in generation.pieces:
                generation.pieces[key] = copied(held.flat, free.pop(key, None))
        generation.described = described
        generation.number = self.number = number
        self._newest, self._older, self.holds = generation, self._newest, False

    def hold(self, number: int, state: State, described: dict[str, Any]) -> None:
        """Makes the state in use the newest generation; all ranks have all of it.

        Args:
            number: The number of this generation, identical on all ranks.
            state: Returns what this rank holds.
            described: What there is beside tensors.
        """
        buffers = {
            (held.name, held.place): copied(held.flat)
            for held in state()
            if held.of.startswith("buffer:")
        }
        self._newest = Generation(number, buffers, described, in_use=state, is_alone=True)
        self._older, self.number, self.holds = Generation(), number, True

    def hold_part(self, number: int, state: State, described: dict[str, Any]) -> None:
        """Makes the state in use the newest generation, of which each rank has a part.

        The one before stays. `restore` follows: until then no rank may end, or that one is used.

        Args:
            number: The number of this generation, identical on all ranks.
            state: Returns what this rank holds.
            described: What there is beside tensors.
        """
        self._newest, self._older = Generation(number, {}, described, in_use=state), self._newest
        self.number, self.holds = number, False

    def before_change(self, *, holds_next: bool) -> None:
        """Ends generations in use, because the optimizer is about to change the state.

        Args:
            holds_next: `hold` follows, and nothing in between waits for other ranks. Otherwise the
                newest generation is copied.
        """
        newest = self._newest
        if newest.in_use is not None:
            copies = {} if holds_next else newest.all_pieces()
            pieces = {key: copied(piece) for key, piece in copies.items()}
            of_copies = Generation(newest.number, pieces, newest.described)
            self._newest = Generation() if holds_next else of_copies
        if self._older.in_use is not None:
            self._older = Generation()

    def restore(self, comm: Communicator, needed: set[str], mine: Any) -> Restored:
        """Finds the newest state that the ranks have whole, and puts it together. Collective.

        Args:
            comm: The ranks that are left, and newcomers.
            needed: Names of the parameters and buffers (`Held.of`) that this rank needs.
            mine: Anything else to gather, as JSON.

        Returns:
            The state; its number is -1 if the training has not begun on any rank.

        Raises:
            Error: The ranks have too few copies.

        Cost: an all_gather; each piece that a rank lacks is sent to all ranks; memory of all the
            tensors that this rank needs.
        """
        if not self._newest.is_whole():  # its transfers have failed: nothing may wait for them
            self._newest = Generation()
        own = {one.number: one for one in (self._newest, self._older) if one.is_whole()}
        pieces_of = {number: one.all_pieces() for number, one in own.items()}
        found = {number: [one.is_alone, listed(pieces_of[number])] for number, one in own.items()}
        gathered = gather_objects([self.number, found, mine], comm)
        infos = [info for _, info, _ in gathered]
        of_ranks = [one for *_, one in gathered]
        if max(number for number, *_ in gathered) == _EMPTY:
            return Restored(_EMPTY, {}, {}, of_ranks)
        for number in _candidates(infos):
            lists = [info.get(str(number), [False, []])[1] for info in infos]
            pieces = exchanged(comm, pieces_of.get(number, {}), lists, needed)
            if pieces is None:
                continue
            described = own[number].described if number in own else {}
            if any(str(number) not in info for info in infos):
                described = next(filter(None, gather_objects(described, comm)))
            return Restored(number, described, pieces, of_ranks)
        raise Error(
            "elastic: more ranks ended at once than there are copies of the state, or a function "
            "given to job.update waited for other ranks: start again from a checkpoint of pc.save, "
            "and take copies=2 or more"
        )


def _candidates(infos: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of generations that the ranks together may have, newest first.

    Args:
        infos: Of each rank, by number: whether it has all pieces by itself, and their list.
    """
    by_itself = {number for info in infos for number, (is_all, _) in info.items() if is_all}
    having = [set(info) for info in infos if info]
    common = set.intersection(*having) if having else set()
    return sorted(map(int, by_itself | common), reverse=True)


__all__ = ["Generation", "Snapshots", "State"]
