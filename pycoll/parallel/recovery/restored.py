"""A whole state from the copies that the ranks have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.parallel.recovery.pieces import Key, cut, in_lines, num_bytes, of, of_list
from pycoll.parallel.trainer.places import Place, assemble, cover_once

_CHUNK_BYTES = 64 << 20  # that all ranks hear of at once

Pieces = dict[str, list[tuple[Place, Tensor]]]  # by the name of the tensor


@dataclass(slots=True)
class Restored:
    """A state that was put together; what `install` needs of one.

    Attributes:
        number: Of its generation; -1: there is no state yet.
        described: What there is beside tensors.
        pieces: The pieces that this rank needs.
        of_ranks: What else has been gathered, by rank.
    """

    number: int
    described: dict[str, Any]
    pieces: Pieces
    of_ranks: list[Any]

    def whole(self, name: str) -> Tensor:
        """See WholeTensors."""
        return assemble(self.pieces[name])

    def states(self, name: str) -> list[str]:
        """See WholeTensors."""
        return [
            key.split(":")[1] for key in self.pieces if key.startswith("state:") and of(key) == name
        ]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a piece comes from: the lowest rank that has it."""

    rank: int
    dtype: torch.dtype


def exchanged(
    comm: Communicator, mine: Mapping[Key, Tensor], of_ranks: Sequence[list[Any]], needed: set[str]
) -> Pieces | None:
    """Exchanges pieces, of which the ranks together have each one once or more. Collective.

    Args:
        comm: The ranks.
        mine: The pieces of this rank.
        of_ranks: What each rank has, as `listed`.
        needed: Names of the parameters and buffers that this rank needs.

    Returns:
        The pieces that it needs; None: pieces of some tensor are missing.
    """
    table, everywhere = _table(of_ranks)
    by_name: dict[str, list[Place]] = {}
    for name, place in table:
        by_name.setdefault(name, []).append(place)
    if not all(cover_once(_filled(places)) for places in by_name.values()):
        return None
    found: Pieces = {}
    for (name, place), piece in mine.items():
        if (name, place) in everywhere and of(name) in needed:
            found.setdefault(name, []).append((place, piece))
    for chunk in _chunks({key: one for key, one in table.items() if key not in everywhere}):
        sizes = [0] * comm.size
        for key in chunk:
            sizes[table[key].rank] += num_bytes(key, table[key].dtype)
        flat = torch.cat(in_lines(mine[key] for key in chunk if table[key].rank == comm.rank))
        gathered = torch.from_numpy(comm.all_gather(flat.numpy(), counts=sizes))
        for rank, part in enumerate(gathered.split(sizes)):
            keys = {key: table[key].dtype for key in chunk if table[key].rank == rank}
            for (name, place), piece in cut(part, keys).items():
                if of(name) in needed:
                    found.setdefault(name, []).append((place, piece))
    return found


def _table(of_ranks: Sequence[list[Any]]) -> tuple[dict[Key, _Source], set[Key]]:
    """All pieces that the ranks have, in one order; and those that each rank has."""
    table: dict[Key, _Source] = {}
    holders: Counter[Key] = Counter()
    for rank, found in enumerate(of_ranks):
        for key, dtype in of_list(found).items():
            table.setdefault(key, _Source(rank, dtype))
            holders[key] += 1
    return table, {key for key in table if holders[key] == len(of_ranks)}


def _filled(places: list[Place]) -> list[Place]:
    """Without the empty ones, if there are others."""
    return [place for place in places if place.count] or places[:1]


def _chunks(table: Mapping[Key, _Source]) -> Iterator[list[Key]]:
    chunk: list[Key] = []
    nbytes = 0
    for key, source in table.items():
        chunk.append(key)
        nbytes += num_bytes(key, source.dtype)
        if nbytes >= _CHUNK_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


__all__ = ["Restored", "exchanged"]
