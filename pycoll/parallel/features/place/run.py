"""Runs this rank's segments of a microbatch: forward, and backward by autograd within each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.devices import Clock
from pycoll.parallel.core.specs import replace, tensors_in
from pycoll.parallel.features.place.graph import attribute
from pycoll.parallel.features.place.mail import Arrivals, Letter, Mail
from pycoll.parallel.features.place.segments import Segment, Segments

Note = Callable[[str, bool, Any, Any], None]  # name, whether the rank waited, start and end


@dataclass(slots=True)
class Passing:
    """One microbatch on one rank.

    Attributes:
        model: The model, with the modules of this rank.
        segments: The model's graph.
        rank: This rank.
        microbatch: Its number.
        mail: The messages of the step.
        known: Results of inputs of these shapes, by the number of the call.
        note: Receives what ran and what was waited for, with its start and end.
        clock: Makes starts and ends.
        loss: The sum of the losses and their count, on the rank of the output.
    """

    model: nn.Module
    segments: Segments
    rank: int
    microbatch: int
    mail: Mail
    known: Arrivals
    note: Note
    clock: Clock
    loss: tuple[Tensor, Any] | None = None
    _held: dict[fx.Node, Any] = field(default_factory=dict)  # what segments take from others
    _made: dict[fx.Node, list[Tensor]] = field(default_factory=dict)  # with gradients to come

    def forward(self, samples: list[Tensor], loss: Callable[[Any], tuple[Tensor, Any]]) -> None:
        """Runs the segments in their order.

        Args:
            samples: The tensors of the input, in order.
            loss: Called with the model's output where it is.
        """
        graph, mine = self.segments.graph, self.segments.of(self.rank)
        given = dict(zip(graph.samples, samples, strict=True))
        with _unwritten(samples, "a function of the batch"):
            for node in self.segments.free(self.rank):
                self._held[node] = given[node] if node in given else self._call(node, self._held)
        arrivals = {node for segment in mine for node in segment.arrives}
        for node in sorted(arrivals, key=self.segments.numbers.__getitem__):
            self.mail.post_result(self._letter(node), self._source(node), self.known)
        for segment in mine:
            for node in segment.arrives:
                start = self.clock.now()
                letter, source = self._letter(node), self._source(node)
                self._held[node] = self.mail.take_result(letter, source, self.known)
                self.note(f"wait for {node.name}", True, start, self.clock.now())
            start = self.clock.now()
            self._run(segment, loss)
            self.note(f"F {segment.name}", False, start, self.clock.now())

    def backward(self, before: Callable[[Segment], None], after: Callable[[Segment], None]) -> None:
        """Runs the backward passes of the segments in reverse.

        Args:
            before: Called with each segment before its backward pass.
            after: Called with each segment when it has run, or has no gradients.
        """
        mine = self.segments.of(self.rank)[::-1]
        for source, node in self._answers():
            self.mail.post_gradients(self._letter(node, True), source, self._made[node])
        for segment in mine:
            roots, gradients = self._gradients(segment)
            before(segment)
            start = self.clock.now()
            if roots:
                torch.autograd.backward(roots, gradients)
            self.note(f"B {segment.name}", False, start, self.clock.now())
            for node in segment.arrives:
                found = [x for x in tensors_in(self._held.pop(node)) if x.requires_grad]
                if found:
                    self.mail.send_gradients(self._letter(node, True), found, self._source(node))
            after(segment)
        self._held.clear()
        self._made.clear()

    def _run(self, segment: Segment, loss: Callable[[Any], tuple[Tensor, Any]]) -> None:
        inputs = {each for node in segment.nodes for each in node.all_input_nodes} & set(self._held)
        try:
            with _unwritten([self._held[node] for node in inputs], segment.name):
                self._compute(segment, loss)
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            raise _written(segment.name) from error

    def _compute(self, segment: Segment, loss: Callable[[Any], tuple[Tensor, Any]]) -> None:
        results: dict[fx.Node, Any] = {}
        for node in segment.nodes:
            if node.op == "output":
                self.loss = loss(fx.map_arg(node.args[0], self._argument(results)))
            else:
                results[node] = self._call(node, results)
        for node in segment.leaves:
            made = [x for x in tensors_in(results[node]) if x.requires_grad]
            self._made[node] = made
            self._held[node] = replace(results[node], Tensor, _leaf)
            if to := self.segments.users(node):
                self.mail.send_result(self._letter(node), results[node], to, self.known)

    def _argument(self, results: Mapping[fx.Node, Any]) -> Callable[[fx.Node], Any]:
        return lambda node: results[node] if node in results else self._held[node]

    def _call(self, node: fx.Node, results: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            found = attribute(node, self.model)
            return self.segments.graph.constants[str(node.target)] if found is None else found
        mapped: Any = fx.map_arg((node.args, dict(node.kwargs)), self._argument(results))
        args, kwargs = mapped
        target: Any = node.target
        if node.op == "call_module":
            return self.model.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def _gradients(self, segment: Segment) -> tuple[list[Tensor], list[Tensor | None]]:
        """The tensors from which a segment's backward pass starts, with their gradients."""
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for node in segment.leaves:
            made = self._made[node]
            leaves = [x for x in tensors_in(self._held.pop(node)) if x.requires_grad]
            found = [leaf.grad for leaf in leaves]
            for source in self.segments.users(node) if made else ():
                start = self.clock.now()
                came = self.mail.take_gradients(self._letter(node, True), source)
                self.note(f"wait for gradient of {node.name}", True, start, self.clock.now())
                found = [_sum(a, b) for a, b in zip(found, came, strict=True)]
            for x, gradient in zip(made, found, strict=True):
                if gradient is not None:
                    roots.append(x)
                    gradients.append(gradient)
        if self.loss is not None and segment.nodes[-1] is self.segments.graph.output:
            total = self.loss[0]
            self.loss = total.detach(), self.loss[1]
            if total.requires_grad:
                roots.append(total)
                gradients.append(None)
        return roots, gradients

    def _answers(self) -> list[tuple[int, fx.Node]]:
        """The ranks whose gradients this rank waits for, in the order in which they are sent."""
        return [
            (segment.rank, node)
            for segment in reversed(self.segments.segments)
            for node in segment.arrives
            if self._made.get(node)
        ]

    def _source(self, node: fx.Node) -> int:
        rank = self.segments.ranks[node]
        assert rank is not None
        return rank

    def _letter(self, node: fx.Node, is_gradient: bool = False) -> Letter:
        return Letter(self.segments.numbers[node], self.microbatch, is_gradient)


@contextmanager
def _unwritten(inputs: Any, name: str) -> Iterator[None]:
    """Checks that calls do not write into what others read, perhaps on other ranks."""
    before = [(x, x._version) for x in tensors_in(inputs)]
    yield
    if any(x._version != version for x, version in before):
        raise _written(name)


def _written(name: str) -> UsageError:
    return UsageError(
        f"place: {name} writes in place into what it is called with, which calls on other ranks "
        "may read: use the form that returns a new tensor, such as nn.ReLU(inplace=False)"
    )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _leaf(x: Tensor) -> Tensor:
    """A tensor from which a segment starts: its gradient is added up in `.grad`."""
    return x.detach().requires_grad_(x.requires_grad)


__all__ = ["Note", "Passing"]
