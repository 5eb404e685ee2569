"""Which server holds which rows: consistent hashing, and the parts of a table that it makes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from pycoll.errors import PeerDiedError, UsageError

MOST_SERVERS = 62  # sets of servers travel as the bits of an int64
_POINTS = 64  # of each server on the ring: shares of the keys differ by about 1 / sqrt(64)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers that servers hold. A model is a table whose rows are blocks of its weights.

    Attributes:
        number: Place in the order of registration, identical on all workers.
        name: Name; it is a part of the keys.
        rows: Number of rows.
        dim: Elements of a row.
        dtype: A floating dtype of torch.
        sparse: Gradients have some rows only; else all.
        std: Standard deviation of the first values; 0: zeros, or those of worker 0.
    """

    number: int
    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    sparse: bool = True
    std: float = 0.0

    def __str__(self) -> str:
        return f"table {self.name!r} of {self.rows} x {self.dim} {self.dtype}"

    def no_key(self, row: int) -> UsageError:
        """The error of a row that does not exist."""
        return UsageError(
            f"parameter server: no server has key {row} of {self}, expected 0 to {self.rows - 1}"
        )


class HashRing:
    """Consistent hashing: a key belongs to the servers of the next points on a ring of hashes.

    If a server is added or removed, 1 / num_servers of the keys move.

    Source: Karger et al. 1997, "Consistent Hashing and Random Trees", STOC.
    """

    def __init__(self, num_servers: int, copies: int = 1) -> None:
        self.num_servers, self.copies = num_servers, copies
        points = np.arange(num_servers * _POINTS, dtype=np.uint64)
        hashes = _mix(points + np.uint64(1 << 40))
        order = np.argsort(hashes)
        self._hashes, servers = hashes[order], order // _POINTS
        # For each point: its server, then the next ones that are not in the list yet.
        twice = np.concatenate([servers, servers]).tolist()
        self._owners = np.array(
            [list(dict.fromkeys(twice[i : i + len(servers)]))[:copies] for i in range(len(servers))]
        )

    def owners(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The servers of each row of a table, the first holder first: [len(rows), copies] int."""
        salt = np.uint64(zlib.crc32(name.encode()) << 32)
        places = np.searchsorted(self._hashes, _mix(rows.astype(np.uint64) ^ salt))
        return self._owners[places % len(self._hashes)]

    def successors(self, owners: list[int], part: int) -> tuple[int, ...]:
        """The other servers, in the order in which they take over from dead owners of a part."""
        if self.copies == 1:
            return ()
        others = [server for server in range(self.num_servers) if server not in owners]
        first = part % max(len(others), 1)  # so that all of them get a share
        return (*others[first:], *others[:first])


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64, [n] uint64 (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a table with the same holders.

    Attributes:
        owners: The servers that have a copy at first; the first living one decides on updates.
        rows: The rows, ascending, [n] int64.
        successors: The servers that get a copy after deaths, in this order; none without copies.
    """

    owners: tuple[int, ...]
    rows: np.ndarray
    successors: tuple[int, ...] = ()

    def holders(self, dead: int) -> list[int]:
        """The living servers that should have a copy; `dead` has a bit for each dead server."""
        living = [s for s in (*self.owners, *self.successors) if not dead >> s & 1]
        return living[: len(self.owners)]

    def server(self, dead: int) -> int:
        """The first living holder.

        Raises:
            PeerDiedError: All holders are dead.
        """
        holders = self.holders(dead)
        if not holders:
            raise self.lost()
        return holders[0]

    def lost(self) -> PeerDiedError:
        """The error of keys whose holders have all died before there was another copy."""
        names = " and ".join(f"server {owner}" for owner in self.owners)
        return PeerDiedError(
            f"parameter server: {names} ended, and {len(self.rows)} keys had no other copy: start "
            "with copies=2 or more to survive the end of a server",
            self.owners[0],
        )


class Layout:
    """The parts of a table.

    Attributes:
        parts: In one order on all ranks.
        part_of: Number of the part of each row, [rows] int32.
        place_of: Place of each row in its part, [rows] int64.
    """

    def __init__(self, table: Table, ring: HashRing) -> None:
        rows = np.arange(table.rows, dtype=np.int64)
        lists, inverse = np.unique(ring.owners(table.name, rows), axis=0, return_inverse=True)
        self.part_of = inverse.reshape(-1).astype(np.int32)
        self.place_of = np.empty(table.rows, np.int64)
        self.parts = []
        for number, owners in enumerate(lists.tolist()):
            mine = np.flatnonzero(self.part_of == number)
            self.place_of[mine] = np.arange(len(mine))
            self.parts.append(Part(tuple(owners), mine, ring.successors(owners, number)))

    def held_by(self, server: int) -> list[int]:
        """Numbers of the parts of which a server has a copy at first."""
        return [i for i, part in enumerate(self.parts) if server in part.owners]

    def decided_by(self, server: int, dead: int) -> list[int]:
        """Numbers of the parts whose first living holder is the server."""
        return [i for i, part in enumerate(self.parts) if part.server(dead) == server]

    def rows_of(self, parts: list[int]) -> np.ndarray:
        """The rows of some parts, part after part, [n] int64."""
        return np.concatenate([self.parts[i].rows for i in parts] or [np.zeros(0, np.int64)])

    def servers_of(self, rows: np.ndarray, dead: int) -> np.ndarray:
        """The first living holder of each of some rows, [len(rows)] int."""
        of_part = np.array([part.server(dead) for part in self.parts])
        return of_part[self.part_of[rows]]


__all__ = ["MOST_SERVERS", "HashRing", "Layout", "Part", "Table"]
