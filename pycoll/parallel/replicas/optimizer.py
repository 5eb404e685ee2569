"""What optimizers of replicas share: they contain one of torch, and exchange weights around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from pycoll.parallel.core.lateness import Late
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.mesh import world
from pycoll.parallel.replicas.weights import Weights


class ReplicaOptimizer(optim.Optimizer, ABC):
    """Steps the weights of one replica, and exchanges them with others.

    Attributes:
        inner: The torch optimizer.
        group: The replicas.
        busy_s: Seconds in which this replica worked in the step, by `lateness.PARTS`; None: not
            measured by a trainer.
    """

    busy_s: Sequence[float] | None = None

    def __init__(self, inner: optim.Optimizer, group: AxisGroup | None) -> None:
        self.inner = inner
        self.group = group or AxisGroup.over(world(), "replicas")
        super().__init__(inner.param_groups, inner.defaults)
        self._share()

    def _share(self) -> None:
        """One state and one list of groups for both optimizers."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def weights(self) -> Weights:
        """The weights that the inner optimizer steps now; pc.optimizer changes its groups."""
        return Weights(p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this replica, and exchanges what is due.

        Args:
            closure: Called first, with gradients enabled; computes them.

        Returns:
            What the closure returned.

        Raises:
            PeerDiedError: A rank that takes part in the exchange has ended.
            TimeoutError: It has not made its step within the communicator's deadline.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.step_and_exchange()
        return result

    @abstractmethod
    def step_and_exchange(self) -> None:
        """Steps `inner` and exchanges weights, as the algorithm says."""

    @property
    def late(self) -> Late | None:
        """The replica that worked longest, by its rank in `group`; None: not known."""
        return None

    def mean(self, vector: Tensor) -> Tensor:
        """The mean of all replicas' vectors, in place. Collective."""
        if self.group.size > 1:
            self.group.all_reduce(vector)
            vector /= self.group.size
        return vector

    @contextmanager
    def mean_weights(self) -> Iterator[None]:
        """Within, every replica has the mean of all weights: to evaluate or save. Collective.

        Cost: an all_reduce of the weights.
        """
        weights = self.weights()
        mine = weights.new()
        with torch.no_grad():
            weights.read(mine)
            weights.write(self.mean(mine.clone()))
        try:
            yield
        finally:
            with torch.no_grad():
                weights.write(mine)

    @torch.no_grad()
    def meet(self) -> None:
        """Gives all replicas the mean of their weights, for good. Collective, between two steps.

        The next barrier of the replicas comes before their next step.

        Cost: an all_reduce of the weights.
        """
        weights = self.weights()
        mine = weights.new()
        weights.read(mine)
        weights.write(self.mean(mine))

    def abort(self, reason: str) -> None:
        """Ends what replicas exchange in the background, without waiting. Not collective.

        Args:
            reason: For the error of the other ranks.
        """

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """The root mean square over the replicas of the distance of their weights from the mean.

        Collective.

        Cost: an all_reduce of the weights.
        """
        weights = self.weights()
        mine = weights.new()
        weights.read(mine)
        apart = mine - self.mean(mine.clone())
        return float(self.mean(apart.double().square().sum().view(1)).sqrt())

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the inner optimizer; weights are loaded before."""
        self.inner.load_state_dict(state_dict)
        self._share()


__all__ = ["ReplicaOptimizer"]
