"""Tensors between stages: sends never block; receives are posted ahead.

Shapes are announced once: each message of new shapes follows an announcement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pycoll.errors import Error
from pycoll.parallel.core import structures
from pycoll.parallel.core.specs import Spec
from pycoll.parallel.core.transfers import Link, Transfers
from pycoll.parallel.pipeline.schedules.actions import Kind, Schedule
from pycoll.parallel.pipeline.stages import Notes, Tensors

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.work import Work


@dataclass(frozen=True, slots=True)
class Arrival:
    """The tensors that enter a stage with a microbatch of certain shapes."""

    specs: tuple[Spec, ...]
    notes: Notes

    def to_json(self) -> bytes:
        """Writes the announcement; objects that are neither data nor a Spec become Unsent."""
        return structures.encode((self.specs, self.notes), _note_to_json)

    @classmethod
    def from_json(cls, text: bytes, sender: str) -> Arrival:
        """Reads an announcement. Raises Error if it is malformed."""
        read = structures.decode(text, _note_from_json, sender)
        match read:
            case (tuple() as specs, dict() as notes) if all(isinstance(s, Spec) for s in specs):
                return cls(specs, notes)
        raise Error(f"{sender} sent {type(read).__name__}, expected an announcement of tensors")


@dataclass(frozen=True, slots=True)
class Unsent:
    """Replaces an object of an earlier stage, such as a cache, that is not sent to other ranks."""

    kind: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this {self.kind} is on the rank of an earlier stage. Stages send each other "
            "tensors, numbers, text, None, and tuples, lists and dicts of them"
        )


def _note_to_json(value: object) -> tuple[str, Any] | None:
    if isinstance(value, Spec):
        dtype = structures.dtype_name(value.dtype)
        return "spec", [list(value.shape), dtype, value.requires_grad, value.device]
    if isinstance(value, (tuple, list, dict, torch.dtype, np.generic)):
        return None
    return "unsent", value.kind if isinstance(value, Unsent) else type(value).__name__


def _note_from_json(kind: str, content: Any) -> Spec | Unsent:
    if kind == "unsent" and isinstance(content, str):
        return Unsent(content)
    if kind != "spec":
        raise ValueError(f"unknown kind {kind!r}")
    shape, dtype, requires_grad, device = content
    spec = Spec(
        structures.shape_of(shape),
        structures.dtype_of(dtype),
        requires_grad is True,
        structures.device_of(device),
    )
    if math.prod(spec.shape) > _MAX_ELEMENTS:
        raise ValueError(f"a tensor of shape {spec.shape}")
    return spec


_MAX_ELEMENTS = 1 << 48  # of an announced tensor
_MAX_KEPT = 8  # arrived tensors that may stay in the list: checking costs time

Key = tuple[Kind, int, int]  # F or B, the stage that receives, microbatch
Sending = tuple["Work", Any]  # a message on its way, and its array


class Messages:
    """The transfers of one step of one rank."""

    def __init__(self, transfers: Transfers, schedule: Schedule) -> None:
        self._transfers, self._comm = transfers, transfers.comm
        self._schedule = schedule
        self._posted: dict[Key, tuple[list[torch.Tensor], list[Work]]] = {}
        self._sent: list[Sending] = []
        self._here: dict[Key, Tensors] = {}
        self.sent_bytes = 0

    def post(self, key: Key, specs: tuple[Spec, ...]) -> None:
        """Posts the receive of tensors with known shapes."""
        link, tag = _link(self._schedule, key), self._tag(key)
        tensors = [spec.empty() for spec in specs]
        works = [self._transfers.receive(link, t, tag) for t in tensors]
        self._posted[key] = (tensors, works)

    def announced(self, key: Key) -> Arrival:
        """Waits for the announcement of a message; the message follows."""
        peer = _link(self._schedule, key).source
        return receive_arrival(self._comm, peer, self._tag(key, is_header=True))

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
        peer = self._schedule.rank_of(key[1], key[2])
        if peer == self._comm.rank:
            self._here[key] = tensors
            return
        if announce is not None:
            self._sent += send_arrival(announce, self._comm, peer, self._tag(key, is_header=True))
        link = _link(self._schedule, key)
        for tensor in tensors:
            self.sent_bytes += tensor.numel() * tensor.element_size()
            sent = tensor.contiguous()
            self._keep(self._transfers.send(link, sent, self._tag(key)), sent)
        if len(self._sent) > _MAX_KEPT:
            self._sent = [(work, kept) for work, kept in self._sent if not work.done()]

    def finish(self) -> None:
        """Waits until the receivers have taken all messages."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _keep(self, work: Work, sent: Any) -> None:
        # The array must live until it is received.
        self._sent.append((work, sent))

    def _tag(self, key: Key, is_header: bool = False) -> int:
        kind, stage, microbatch = key
        number = microbatch * self._schedule.num_stages + stage
        return number * 4 + 2 * (kind is Kind.B) + is_header


def send_arrival(arrival: Arrival, comm: Communicator, peer: int, tag: int) -> list[Sending]:
    """Starts to send an announcement; returns the works, with the arrays that must live on."""
    content = np.frombuffer(arrival.to_json(), np.uint8)
    headers = (np.array([content.size], np.int64), content)
    return [(comm.send(header, peer, tag, async_op=True), header) for header in headers]


def receive_arrival(comm: Communicator, peer: int, tag: int) -> Arrival:
    """Waits for an announcement. Raises Error if it is malformed."""
    sender = f"rank {peer}"
    length = np.zeros(1, np.int64)
    comm.recv(length, peer, tag)
    content = np.empty(structures.check_length(int(length[0]), sender), np.uint8)
    comm.recv(content, peer, tag)
    return Arrival.from_json(content.tobytes(), sender)


def links_of(schedule: Schedule) -> list[Link]:
    """The links between stages on different ranks: for each stage, direction and pair of ranks."""
    last = schedule.num_stages - 1
    keys = [(Kind.F, stage) for stage in range(1, last + 1)]
    keys += [(Kind.B, stage) for stage in range(last)]
    turns = range(math.lcm(*schedule.replicas) if schedule.replicas else 1)
    links = dict.fromkeys(_link(schedule, (*key, i)) for key in keys for i in turns)
    return [link for link in links if link.source != link.target]


def _link(schedule: Schedule, key: Key) -> Link:
    """The link by which a stage receives activations (F) or gradients (B) of a microbatch."""
    kind, stage, microbatch = key
    sender = stage - 1 if kind is Kind.F else stage + 1
    source, target = schedule.rank_of(sender, microbatch), schedule.rank_of(stage, microbatch)
    return Link(source, target, f"{kind.name} {stage}")


__all__ = ["Arrival", "Key", "Messages", "Sending", "links_of", "receive_arrival", "send_arrival"]
