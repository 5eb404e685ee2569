"""Results and gradients of calls between ranks: sends never block, known receives are posted ahead.

The first message of a result is announced. Those of inputs of the same shapes are not, if the
result has tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.core.specs import Spec, describe, replace, tensors_in
from pycoll.parallel.core.transfers import Link, Transfers
from pycoll.parallel.pipeline.messages import Arrival, Sending, receive_arrival, send_arrival

if TYPE_CHECKING:
    from pycoll.work import Work

Arrivals = dict[int, Arrival]  # by the number of the call, for inputs of some shapes


class Letter(NamedTuple):
    """A message.

    Attributes:
        number: Number of the call whose result or gradient is sent.
        microbatch: The microbatch.
        is_gradient: Whether it is a gradient.
    """

    number: int
    microbatch: int
    is_gradient: bool


class Mail:
    """The messages of one step of one rank."""

    def __init__(self, transfers: Transfers, num_calls: int) -> None:
        """Opens the mail of a step.

        Args:
            transfers: Those of the ranks of pp.
            num_calls: Numbers of calls are below it.
        """
        self._transfers, self._comm, self._num_calls = transfers, transfers.comm, num_calls
        self._posted: dict[tuple[Letter, int], tuple[list[Tensor], list[Work]]] = {}
        self._sent: list[Sending] = []
        self.sent_bytes = 0

    def send_result(self, letter: Letter, value: Any, to: Iterable[int], known: Arrivals) -> None:
        """Sends a call's result to ranks, after an announcement if its kind is not known.

        Args:
            letter: The message.
            value: Tensors, numbers, text, None, and tuples, lists and dicts of them.
            to: The ranks.
            known: What was announced before; the announcement is added.

        Raises:
            UsageError: The tensors have other shapes than those of earlier inputs like these.
        """
        tensors = list(tensors_in(value))
        arrival = Arrival(tuple(map(Spec.of, tensors)), {"value": describe(value)})
        before = known.get(letter.number)
        if before is not None and _is_fixed(before) and before != arrival:
            raise UsageError(
                f"place: call {letter.number} of the forward returns {arrival.specs}, but "
                f"{before.specs} before, from inputs of the same shapes: place it and the calls "
                "that use it on one rank"
            )
        known[letter.number] = arrival
        for rank in to:
            if before is None or not _is_fixed(before):
                tag = self._tag(letter, is_header=True)
                self._sent += send_arrival(arrival, self._comm, rank, tag)
            self._send(letter, tensors, rank)

    def post_result(self, letter: Letter, source: int, known: Arrivals) -> None:
        """Posts the receive of a result, if its kind is known."""
        arrival = known.get(letter.number)
        if arrival is not None and _is_fixed(arrival):
            self._post(letter, source, [spec.empty() for spec in arrival.specs])

    def take_result(self, letter: Letter, source: int, known: Arrivals) -> Any:
        """Waits for a result; its tensors want gradients if they did where they come from."""
        if (letter, source) not in self._posted:
            tag = self._tag(letter, is_header=True)
            known[letter.number] = receive_arrival(self._comm, source, tag)
            self._post(letter, source, [spec.empty() for spec in known[letter.number].specs])
        tensors = iter(self._take(letter, source))

        def filled(spec: Spec) -> Tensor:
            return next(tensors).requires_grad_(spec.requires_grad and torch.is_grad_enabled())

        return replace(known[letter.number].notes["value"], Spec, filled)

    def send_gradients(self, letter: Letter, tensors: Iterable[Tensor], to: int) -> None:
        """Sends `.grad` of tensors that arrived; a zero of a first tensor marks one that is None.

        A parameter that only such tensors lead to keeps its value, as on one process.
        """
        found = [(x, x.grad) for x in tensors]
        present = torch.tensor([gradient is not None for _, gradient in found], dtype=torch.uint8)
        sent = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in found]
        self._send(letter, [present, *sent], to)

    def post_gradients(self, letter: Letter, source: int, of: list[Tensor]) -> None:
        """Posts the receive of the gradients of tensors that were sent."""
        present = torch.empty(len(of), dtype=torch.uint8)
        self._post(letter, source, [present, *(torch.empty(x.shape, dtype=x.dtype) for x in of)])

    def take_gradients(self, letter: Letter, source: int) -> list[Tensor | None]:
        """Waits for gradients whose receive is posted; None where there is none."""
        present, *gradients = self._take(letter, source)
        return [x if there else None for x, there in zip(gradients, present, strict=True)]

    def finish(self) -> None:
        """Waits until the receivers have taken all messages."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, letter: Letter, tensors: Iterable[Tensor], to: int) -> None:
        link = Link(self._comm.rank, to, "place")
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            self.sent_bytes += sent.nbytes
            self._sent.append((self._transfers.send(link, sent, self._tag(letter)), sent))

    def _post(self, letter: Letter, source: int, tensors: list[Tensor]) -> None:
        link, tag = Link(source, self._comm.rank, "place"), self._tag(letter)
        works = [self._transfers.receive(link, tensor, tag) for tensor in tensors]
        self._posted[letter, source] = tensors, works

    def _take(self, letter: Letter, source: int) -> list[Tensor]:
        tensors, works = self._posted.pop((letter, source))
        for work in works:
            work.wait()
        return tensors

    def _tag(self, letter: Letter, is_header: bool = False) -> int:
        number = letter.microbatch * self._num_calls + letter.number
        return number * 4 + 2 * letter.is_gradient + is_header


def _is_fixed(arrival: Arrival) -> bool:
    """Whether a result has tensors alone, so that the next one of its kind is like it."""
    return _has_tensors_alone(arrival.notes["value"])


def _has_tensors_alone(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return all(map(_has_tensors_alone, value))
    return value is None or isinstance(value, Spec)


__all__ = ["Arrivals", "Letter", "Mail"]
