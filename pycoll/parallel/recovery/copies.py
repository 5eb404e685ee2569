"""Which rank copies which pieces, and the messages to ranks that lack some."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.parallel.recovery.pieces import Key, cut, in_lines, listed, of_list
from pycoll.parallel.trainer.training_state import Held
from pycoll.work import Work


@dataclass(slots=True)
class Share:
    """What one rank copies.

    Attributes:
        keeps: Names of parameters and buffers (`Held.of`) whose pieces it copies.
        sends: Those whose pieces it sends to another rank, by rank.
        hears: The ranks that send it pieces.
    """

    keeps: set[str] = field(default_factory=set)
    sends: dict[int, set[str]] = field(default_factory=dict)
    hears: set[int] = field(default_factory=set)


def shares(holdings: Sequence[Mapping[str, Any]], hosts: Sequence[int], copies: int) -> list[Share]:
    """Shares out the copies: each piece is copied on `copies` + 1 ranks, or on all.

    They are on as many hosts as possible, so that also `copies` hosts may end. On a host, ranks
    that hold a piece copy it in turn; other ranks get it by messages.

    Args:
        holdings: Of each rank, the place of its piece of each parameter and buffer, as JSON.
        hosts: Of each rank, the number of its host.
        copies: Number of ranks that may end at once.
    """
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, of_rank in enumerate(holdings):
        for name, place in of_rank.items():
            holders.setdefault((name, json.dumps(place)), []).append(rank)
    found = [Share() for _ in holdings]
    copiers = cache(partial(_copiers, _Hosts(hosts), copies + 1))
    for turn, ((name, _), ranks) in enumerate(holders.items()):
        sender = ranks[turn % len(ranks)]
        for rank in copiers(tuple(ranks), sender):
            if rank in ranks:
                found[rank].keeps.add(name)
            else:
                found[sender].sends.setdefault(rank, set()).add(name)
                found[rank].hears.add(sender)
    return found


class _Hosts:
    """Where ranks are."""

    def __init__(self, of_ranks: Sequence[int]) -> None:
        numbers = sorted(set(of_ranks))
        self.of = [numbers.index(host) for host in of_ranks]
        self._ranks = [[r for r, of in enumerate(self.of) if of == h] for h in range(len(numbers))]
        self._within = [self._ranks[host].index(rank) for rank, host in enumerate(self.of)]

    def distance(self, rank: int, other: int) -> tuple[int, int]:
        """Hosts from a rank to another one, and ranks within that host; both in a circle."""
        host = self.of[other]
        places = self._within[other] - self._within[rank]
        return (host - self.of[rank]) % len(self._ranks), places % len(self._ranks[host])


def _copiers(hosts: _Hosts, wanted: int, holders: tuple[int, ...], first: int) -> list[int]:
    """The ranks that copy a piece: hosts that have no copy yet go first, and then its holders."""
    left, found = set(range(len(hosts.of))), [first]
    while (left := left - {found[-1]}) and len(found) < wanted:
        used = {hosts.of[rank] for rank in found}

        def cost(rank: int, used: set[int] = used) -> tuple[bool, bool, tuple[int, int]]:
            return hosts.of[rank] in used, rank not in holders, hosts.distance(first, rank)

        found.append(min(left, key=cost))
    return found


def holding(state: Iterable[Held]) -> dict[str, Any]:
    """The places of a rank's pieces of parameters and buffers, by name, as JSON."""
    return {
        held.of: [held.place.as_json(), held.place.count] for held in state if held.name == held.of
    }


class Copies:
    """This rank's share of the copies on one mesh, and the messages for it.

    Attributes:
        are_everywhere: Each rank has all pieces: the ranks are replicas.
    """

    def __init__(
        self, world: Communicator, holdings: Sequence[tuple[Mapping[str, Any], int]], copies: int
    ) -> None:
        """Shares the copies out. Collective.

        Args:
            world: The ranks.
            holdings: What `holding` returned, and the number of the host, of each rank.
            copies: Number of ranks that may end at once.

        Cost: a split, if some pieces are sent.
        """
        held, hosts = zip(*holdings, strict=True)
        of_ranks = shares(held, hosts, copies)
        self._share = of_ranks[world.rank]
        self.are_everywhere = all(of_rank == held[0] for of_rank in held)
        needs_messages = any(share.sends for share in of_ranks)
        self._messages = world.split(0) if needs_messages else None
        self._sent: dict[int, bytes] = {}  # the last list, by receiver
        self._heard: dict[int, dict[Key, torch.dtype]] = {}  # likewise, by sender
        self._buffers: dict[tuple[str, int, int], Tensor] = {}
        self._turn = 0

    def keeps(self, of: str) -> bool:
        """Whether this rank copies the pieces of a parameter or buffer."""
        return of in self._share.keeps

    def exchange(self, state: Sequence[Held]) -> tuple[dict[Key, Tensor], list[Work]]:
        """Starts to send and receive pieces.

        Two exchanges later, the buffers are used again.

        Args:
            state: What this rank holds.

        Returns:
            Copies of the pieces that go and of those that come, and the transfers after which they
            are there.
        """
        self._turn ^= 1
        works: list[Work] = []
        copies: dict[Key, Tensor] = {}
        for peer, names in self._share.sends.items():
            pieces = {(held.name, held.place): held.flat for held in state if held.of in names}
            text = json.dumps(listed(pieces)).encode()
            header = b"" if self._sent.get(peer) == text else text
            self._sent[peer] = text
            lines = in_lines(pieces.values())
            nbytes = sum(map(len, lines))
            body = self._buffer("send", peer, nbytes)
            torch.cat(lines, out=body)
            copies |= cut(body, {key: piece.dtype for key, piece in pieces.items()})
            works.append(self._comm.send(np.array([len(header), nbytes]), peer, async_op=True))
            if header:
                works.append(self._comm.send(np.frombuffer(header, np.uint8), peer, async_op=True))
            works.append(self._comm.send(body, peer, async_op=True))
        for peer in sorted(self._share.hears):
            header_bytes, nbytes = self._comm.recv(np.zeros(2, np.int64), peer).tolist()
            if header_bytes:
                text = self._comm.recv(np.empty(header_bytes, np.uint8), peer).tobytes()
                self._heard[peer] = of_list(json.loads(text))
            body = self._buffer("receive", peer, nbytes)
            works.append(self._comm.recv(body, peer, async_op=True))
            copies |= cut(body, self._heard[peer])
        return copies, works

    def close(self, reason: str) -> None:
        """Ends the messages.

        Args:
            reason: For the error of ranks that wait for one.
        """
        if self._messages is not None:
            self._messages.abort(reason)
            self._messages.close()

    @property
    def _comm(self) -> Communicator:
        assert self._messages is not None
        return self._messages

    def _buffer(self, way: str, peer: int, nbytes: int) -> Tensor:
        key = way, peer, self._turn
        if key not in self._buffers or len(self._buffers[key]) != nbytes:
            self._buffers[key] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffers[key]


__all__ = ["Copies", "Share", "holding", "shares"]
