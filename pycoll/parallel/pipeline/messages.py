"""Tensors between stages: sends are tagged and never block; receives are posted ahead.

Shapes are announced once: each message of new shapes follows an announcement.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pycoll.parallel.pipeline.schedules.actions import Kind
from pycoll.parallel.pipeline.specs import Spec
from pycoll.parallel.pipeline.stages import Notes, Tensors

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.work import Work


@dataclass(frozen=True, slots=True)
class Arrival:
    """The tensors that enter a stage with a microbatch of certain shapes."""

    specs: tuple[Spec, ...]
    notes: Notes


_MAX_KEPT = 8  # arrived tensors that may stay in the list: checking costs time

Key = tuple[Kind, int, int]  # F or B, the stage that receives, microbatch


class Messages:
    """The transfers of one step of one rank."""

    def __init__(self, comm: Communicator, placement: tuple[int, ...]) -> None:
        self._comm = comm
        self._placement = placement
        self._posted: dict[Key, tuple[list[torch.Tensor], list[Work]]] = {}
        self._sent: list[tuple[Work, torch.Tensor]] = []
        self._here: dict[Key, Tensors] = {}
        self.sent_bytes = 0

    def post(self, key: Key, specs: tuple[Spec, ...]) -> None:
        """Posts the receive of tensors with known shapes."""
        peer, tag = self._sender(key), self._tag(key)
        tensors = [spec.empty() for spec in specs]
        works = [self._comm.recv(t, peer, tag, async_op=True) for t in tensors]
        self._posted[key] = (tensors, works)

    def announced(self, key: Key) -> Arrival:
        """Waits for the announcement of a message; the message follows."""
        peer, tag = self._sender(key), self._tag(key, is_header=True)
        length = np.zeros(1, np.int64)
        self._comm.recv(length, peer, tag)
        content = np.empty(int(length[0]), np.uint8)
        self._comm.recv(content, peer, tag)
        arrival = pickle.loads(content.tobytes())  # from a rank of our own job
        assert isinstance(arrival, Arrival)
        return arrival

    def take(self, key: Key) -> list[torch.Tensor]:
        """Waits for tensors of a posted receive, or takes those that a stage of this rank left."""
        if key in self._here:
            return list(self._here.pop(key))
        tensors, works = self._posted.pop(key)
        for work in works:
            work.wait()
        return tensors

    def send(self, key: Key, tensors: Tensors, announce: Arrival | None = None) -> None:
        """Sends tensors to the stage of the key, after an announcement if one is given."""
        peer = self._placement[key[1]]
        if peer == self._comm.rank:
            self._here[key] = tensors
            return
        if announce is not None:
            content = np.frombuffer(pickle.dumps(announce), np.uint8)
            tag = self._tag(key, is_header=True)
            self._start(np.array([content.size], np.int64), peer, tag)
            self._start(content, peer, tag)
        for tensor in tensors:
            self.sent_bytes += tensor.numel() * tensor.element_size()
            self._start(tensor.contiguous(), peer, self._tag(key))
        if len(self._sent) > _MAX_KEPT:
            self._sent = [(work, kept) for work, kept in self._sent if not work.done()]

    def finish(self) -> None:
        """Waits until the receivers have taken all messages."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _start(self, x: Any, peer: int, tag: int) -> None:
        # The array must live until it is received.
        self._sent.append((self._comm.send(x, peer, tag, async_op=True), x))

    def _sender(self, key: Key) -> int:
        kind, stage, _ = key
        return self._placement[stage - 1 if kind is Kind.F else stage + 1]

    def _tag(self, key: Key, is_header: bool = False) -> int:
        kind, stage, microbatch = key
        number = microbatch * len(self._placement) + stage
        return number * 4 + 2 * (kind is Kind.B) + is_header


__all__ = ["Arrival", "Key", "Messages"]
