"""Local steps: replicas step alone, and average what they have changed every now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn, optim

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup, Started
from pycoll.parallel.replicas.compression import Compressor, ErrorFeedback, compressor_of
from pycoll.parallel.replicas.optimizer import ReplicaOptimizer
from pycoll.parallel.replicas.weights import Weights

_OUTER = "outer "
_OUTER_STEP = _OUTER + "step"


class Fragment:
    """A part of the weights that is exchanged as a unit.

    Attributes:
        place: Its elements in the vector of all weights.
    """

    def __init__(
        self,
        place: slice,
        weights: Tensor,
        group: AxisGroup,
        make_outer: Callable[[list[Tensor]], optim.Optimizer],
        compressor: Compressor | None,
    ) -> None:
        self.place, self._group = place, group
        self._common = nn.Parameter(weights[place].clone())  # identical on all replicas
        self._common.grad = torch.zeros_like(self._common)
        self._outer = make_outer([self._common])
        self._feedback = None if compressor is None else ErrorFeedback(compressor)
        self._at_start = torch.empty_like(self._common)
        self._messages: Tensor | None = None
        self._started: Started | None = None

    def read_outer(self, vectors: dict[str, Tensor]) -> None:
        """Copies the common weights, and what the outer optimizer keeps of them, to vectors.

        Args:
            vectors: Of all weights, by name; those that are missing are made.
        """
        state = {"weights": self._common.detach(), **self._outer.state.get(self._common, {})}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self._common.shape:
                whole = vectors.setdefault(key, torch.zeros_like(vectors["weights"]))
                whole[self.place] = value

    @torch.no_grad()
    def write_outer(self, vectors: dict[str, Tensor]) -> None:
        """The inverse of `read_outer`."""
        found = {key: vector[self.place].clone() for key, vector in vectors.items()}
        self._common.copy_(found.pop("weights"))
        self._outer.state[self._common].update(found)

    @property
    def is_exchanging(self) -> bool:
        """Whether an exchange has begun and not ended."""
        return self._started is not None

    def start(self, weights: Tensor) -> None:
        """Starts adding up how far the replicas' weights are from the common ones."""
        change = self._common.grad
        assert change is not None
        self._at_start.copy_(weights[self.place])
        torch.sub(self._common.detach(), self._at_start, out=change)
        if self._feedback is None:
            self._started = self._group.start("all_reduce", change, change)
            return
        message = self._feedback.encode(change)
        self._messages = message.new_empty(self._group.size, message.numel())
        self._started = self._group.start("all_gather", self._messages, message, self._messages)

    def finish(self, weights: Tensor) -> None:
        """Steps the common weights, and moves the replica's by as much as they differ.

        What the replica has changed since the start stays in its weights.
        """
        assert self._started is not None
        change = self._common.grad
        assert change is not None
        self._started.wait()
        self._started = None
        if self._feedback is not None and self._messages is not None:
            change.zero_()
            for message in self._messages:  # in rank order: the same bits everywhere
                change += self._feedback.compressor.decode(message, change)
        change /= self._group.size
        self._outer.step()
        weights[self.place] += self._common.detach() - self._at_start


class LocalSteps(ReplicaOptimizer):
    """Steps this replica alone; every `steps` steps, the mean change of all is stepped.

    What belongs to the outer steps is copied to the inner optimizer's state, with names that begin
    with "outer ", where it may be saved, until the next step. The first step continues from there.
    """

    def __init__(
        self,
        inner: optim.Optimizer,
        steps: int,
        make_outer: Callable[[list[Tensor]], optim.Optimizer],
        compress: str | Compressor | None,
        fragments: int,
        overlap: int,
        group: AxisGroup | None,
    ) -> None:
        if steps < 1 or not 1 <= fragments <= steps or not 0 <= overlap < steps:
            raise UsageError(
                f"local steps: steps={steps}, fragments={fragments}, overlap={overlap}: expected "
                "1 or more steps, at most as many fragments, and an overlap of fewer steps"
            )
        self._compressor = compressor_of(compress)
        super().__init__(inner, group)
        self._num_steps, self._overlap = steps, overlap
        self._num_fragments, self._make_outer = fragments, make_outer
        self._step_idx = 0
        self._fragments: list[Fragment] = []

    def step_and_exchange(self) -> None:
        """See ReplicaOptimizer."""
        weights = self.weights()
        if not self._fragments:
            self._make_fragments(weights)
        self._forget_outer()
        self.inner.step()
        self._step_idx += 1
        due = [(self._step_idx - self._turn(i)) % self._num_steps for i in self._turns()]
        begun = self._step_idx >= self._num_steps
        if begun and any(late in (0, self._overlap) for late in due):
            vector = weights.new()
            weights.read(vector)
            for fragment, late in zip(self._fragments, due, strict=True):
                if late == 0 and not fragment.is_exchanging:
                    fragment.start(vector)
                if late == self._overlap and fragment.is_exchanging:
                    fragment.finish(vector)
            weights.write(vector)

    def _turns(self) -> range:
        return range(self._num_fragments)

    def _turn(self, fragment: int) -> int:
        """At which of every `steps` steps a fragment is exchanged."""
        return fragment * self._num_steps // self._num_fragments

    def _make_fragments(self, weights: Weights) -> None:
        vector = weights.new()
        weights.read(vector)
        ends = [vector.numel() * i // self._num_fragments for i in range(self._num_fragments + 1)]
        self._fragments = [
            Fragment(slice(a, b), vector, self.group, self._make_outer, self._compressor)
            for a, b in zip(ends[:-1], ends[1:], strict=True)
        ]
        self._continue_outer(weights)

    @contextmanager
    def mean_weights(self) -> Iterator[None]:
        """See ReplicaOptimizer."""
        with super().mean_weights():
            self._show_outer()
            try:
                yield
            finally:
                self._forget_outer()

    def meet(self) -> None:
        """See ReplicaOptimizer."""
        super().meet()
        self._show_outer()

    def _show_outer(self) -> None:
        """Copies the state of the outer steps to that of the inner optimizer."""
        weights = self.weights()
        vectors = {"weights": weights.new()}
        for fragment in self._fragments:
            fragment.read_outer(vectors)
        for key, vector in vectors.items() if self._fragments else ():
            values = [torch.empty_like(p) for p in weights.tensors]
            Weights(values).write(vector)
            for p, value in zip(weights.tensors, values, strict=True):
                self.state[p][_OUTER + key] = value.detach()
                self.state[p][_OUTER_STEP] = torch.tensor(float(self._step_idx))

    def _continue_outer(self, weights: Weights) -> None:
        """Takes over what `_show_outer` has copied, here or before a restart."""
        first = self.state.get(weights.tensors[0], {})
        if _OUTER_STEP not in first:
            return
        self._step_idx = int(first[_OUTER_STEP])
        vectors = {}
        for key in first:
            if key.startswith(_OUTER) and key != _OUTER_STEP:
                vectors[key.removeprefix(_OUTER)] = vector = weights.new()
                Weights(self.state[p][key] for p in weights.tensors).read(vector)
        for fragment in self._fragments:
            fragment.write_outer(vectors)

    def _forget_outer(self) -> None:
        if _OUTER_STEP not in next(iter(self.state.values()), {}):  # in most steps
            return
        for of_one in self.state.values():
            for key in [key for key in of_one if key.startswith(_OUTER)]:
                del of_one[key]


def diloco(
    optimizer: optim.Optimizer,
    steps: int = 50,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compress: str | Compressor | None = None,
    fragments: int = 1,
    overlap: int = 0,
    group: AxisGroup | None = None,
) -> LocalSteps:
    """Trains replicas alone for many steps, then steps all of them by their mean change.

    The outer step is SGD with Nesterov momentum, whose gradient is how far the replicas have moved
    from their common weights, in the mean. `outer_lr=1, outer_momentum=0` is local SGD: the
    replicas' weights are averaged.

    Args:
        optimizer: A torch optimizer of a model that all replicas made with the same weights.
        steps: Local steps between two exchanges of the same weights.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Its momentum.
        compress: "int8", "topk", "topk:SHARE" or a Compressor, with error feedback; None: floats.
        fragments: Parts of the weights that are exchanged at different steps, so that no step
            waits for all of them.
        overlap: Steps during which an exchange runs in the background before it is applied.
        group: The replicas; None: all ranks of the job.

    Returns:
        The optimizer; call its `step()` after each backward pass.

    Raises:
        UsageError: The numbers do not fit each other.

    Cost: every `steps` steps, an all_reduce of the weights, or with `compress` an all_gather of the
        replicas' messages; two copies of the weights, and the momentum.

    Source: Douillard et al. 2023, "DiLoCo", arXiv:2311.08105; 2025, "Streaming DiLoCo",
        arXiv:2501.18512 (fragments, overlap); Stich 2018, arXiv:1805.09767 (local SGD).
    """
    nesterov = outer_momentum > 0

    def make_outer(parameters: list[Tensor]) -> optim.Optimizer:
        return optim.SGD(parameters, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)

    return LocalSteps(optimizer, steps, make_outer, compress, fragments, overlap, group)


__all__ = ["LocalSteps", "diloco"]
