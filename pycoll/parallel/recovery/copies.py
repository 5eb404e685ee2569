"""Which rank copies which pieces, and the messages to ranks that lack some."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


def shares(holdings: Sequence[Mapping[str, Any]], copies: int) -> list[Share]:
    """Shares out the copies: each piece is copied on `copies` + 1 ranks, or on all.

    Ranks that hold a piece copy it in turn. If too few hold it, the next ranks get it by messages;
    ranks are in the order of hosts, so these are on another host where a host has one rank.

    Args:
        holdings: Of each rank, the place of its piece of each parameter and buffer, as JSON.
        copies: Number of ranks that may end at once.
    """
    size = len(holdings)
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, of_rank in enumerate(holdings):
        for name, place in of_rank.items():
            holders.setdefault((name, json.dumps(place)), []).append(rank)
    found = [Share() for _ in holdings]
    for turn, ((name, _), ranks) in enumerate(holders.items()):
        wanted = min(copies + 1, size)
        stride = max(len(ranks) // wanted, 1)
        for i in range(min(wanted, len(ranks))):
            found[ranks[(turn + i * stride) % len(ranks)]].keeps.add(name)
        sender = ranks[0]
        after = [(sender + i) % size for i in range(1, size)]
        others = [rank for rank in after if rank not in ranks]
        for rank in others[: max(wanted - len(ranks), 0)]:
            found[sender].sends.setdefault(rank, set()).add(name)
            found[rank].hears.add(sender)
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

    def __init__(self, world: Communicator, holdings: Sequence[Mapping[str, Any]], copies: int):
        """Shares the copies out. Collective.

        Args:
            world: The ranks.
            holdings: What `holding` returned, of each rank.
            copies: Number of ranks that may end at once.

        Cost: a split, if some pieces are sent.
        """
        of_ranks = shares(holdings, copies)
        self._share = of_ranks[world.rank]
        self.are_everywhere = all(of_rank == holdings[0] for of_rank in holdings)
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

    def close(self) -> None:
        """Ends the messages."""
        if self._messages is not None:
            self._messages.abort("the training continues on other ranks")
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
