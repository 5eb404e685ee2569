"""Rounds of gossip: how a rank's weights and its neighbors' become new weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pycoll.errors import UsageError
from pycoll.parallel.replicas.compression import Compressor
from pycoll.parallel.replicas.weights import Neighbors, Pending, Weights


class Mixing(Protocol):
    """One way to mix weights."""

    def step(self, update: Callable[[], object]) -> None:
        """Runs the optimizer's step, and mixes the weights with those of the neighbors."""

    def settle(self) -> None:
        """Gives the weights what neighbors have changed since the last step."""

    def forget(self) -> None:
        """Says that the weights have been replaced."""

    def close(self) -> None:
        """Ends the exchange for good."""


class Synchronous:
    """What the mixings with rounds share."""

    def __init__(self, weights: Weights, neighbors: Neighbors) -> None:
        self.weights, self.neighbors = weights, neighbors
        self.round_idx = 0

    def settle(self) -> None:
        """See Mixing."""

    def forget(self) -> None:
        """See Mixing."""

    def close(self) -> None:
        """See Mixing."""
        self.neighbors.close()

    def own_share(self) -> float:
        """Weight of this rank's own vector in this round."""
        rank = self.neighbors.group.rank
        return float(self.neighbors.graph.matrix(self.round_idx)[rank, rank])


class DPSGD(Synchronous):
    """x_i <- sum_j W_ij x_j - lr g_i(x_i): the exchange runs while the gradient is computed.

    Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?",
        arXiv:1705.09056.
    """

    def __init__(self, weights: Weights, neighbors: Neighbors) -> None:
        super().__init__(weights, neighbors)
        if not neighbors.graph.is_balanced:
            raise UsageError(
                f"gossip: graph {neighbors.graph.name} gives ranks unequal shares, so the mean of "
                "the weights would drift: take mode='sgp', which corrects for that"
            )
        self._before, self._after = weights.new(), weights.new()
        self._pending: Pending | None = None
        # A backward pass starts the exchange with its first gradient; if none does, the step does.
        self._hooks = [
            x.register_post_accumulate_grad_hook(lambda _: self._begin())
            for x in weights.tensors
            if x.is_leaf and x.requires_grad
        ]

    def step(self, update: Callable[[], object]) -> None:
        """See Mixing."""
        self._begin()
        assert self._pending is not None
        update()
        self.weights.read(self._after)
        coming = self._pending.wait()
        self._pending = None
        rank, before = self.neighbors.group.rank, self._before
        mixed = self._after.add_(before, alpha=self.own_share() - 1.0)
        for source, share in self.neighbors.graph.sources(rank, self.round_idx).items():
            mixed.add_(coming[source], alpha=share)
        self.round_idx += 1
        self.weights.write(mixed)

    def close(self) -> None:
        """See Mixing."""
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _begin(self) -> None:
        if self._pending is None:
            self.weights.read(self._before)
            self._pending = self.neighbors.start(self.round_idx, self._before)


class PushSum(Synchronous):
    """Stochastic gradient push: each rank gives shares away, and divides by what it holds.

    The last element of the vector is the share of the mean that the rank holds, so any connected
    graph leads to the mean, one of one-way edges too.

    Source: Assran et al. 2019, "Stochastic Gradient Push", arXiv:1811.10792.
    """

    def __init__(self, weights: Weights, neighbors: Neighbors) -> None:
        super().__init__(weights, neighbors)
        self._held, self._before = weights.new(1), weights.new()
        self._share = 1.0

    def step(self, update: Callable[[], object]) -> None:
        """See Mixing."""
        held, count = self._held, self.weights.count
        self.weights.read(self._before)
        update()
        self.weights.read(held)
        # The optimizer has changed the quotient; its change goes to the numerator as it is.
        held[:count].add_(self._before, alpha=self._share - 1.0)
        held[count] = self._share
        rank, graph = self.neighbors.group.rank, self.neighbors.graph
        # The receiver scales what arrives: one vector serves all targets.
        coming = self.neighbors.start(self.round_idx, held).wait()
        held *= self.own_share()
        for source, share in graph.sources(rank, self.round_idx).items():
            held.add_(coming[source], alpha=share)
        self.round_idx += 1
        self._share = float(held[count])
        self.weights.write(held[:count] / self._share)


class Choco(Synchronous):
    """Gossip with compressed differences: neighbors follow estimates of each other's weights.

    Source: Koloskova et al. 2019, "Decentralized Stochastic Optimization and Gossip Algorithms
        with Compressed Communication", arXiv:1902.00340.
    """

    def __init__(self, weights: Weights, neighbors: Neighbors, compressor: Compressor) -> None:
        super().__init__(weights, neighbors)
        graph = neighbors.graph
        if not graph.is_balanced or len(graph.rounds) > 1:
            raise UsageError(
                f"gossip: compress= follows estimates of fixed neighbors, and graph {graph.name} "
                "changes from round to round or gives unequal shares: take another graph, such as "
                "pc.graph.exponential, or compress=None"
            )
        self._compressor = compressor
        self._own = weights.new()  # what the neighbors take this rank's weights for
        self._mean = weights.new()  # the weighted mean of all these estimates
        self._now = weights.new()

    def step(self, update: Callable[[], object]) -> None:
        """See Mixing."""
        if self.round_idx == 0:
            self._meet()
        update()
        self.weights.read(self._now)
        message = self._compressor.encode(self._now - self._own)
        pending = self.neighbors.start(self.round_idx, message)
        own = self._compressor.decode(message, self._own)
        self._own += own
        self._mean.add_(own, alpha=self.own_share())
        coming = pending.wait()
        rank = self.neighbors.group.rank
        for source, share in self.neighbors.graph.sources(rank, self.round_idx).items():
            self._mean.add_(self._compressor.decode(coming[source], self._own), alpha=share)
        self.round_idx += 1
        self._now.add_(self._mean - self._own, alpha=self._compressor.consensus_rate)
        self.weights.write(self._now)

    def _meet(self) -> None:
        """Begins the estimates with whole weights, so that all later differences are small."""
        self.weights.read(self._own)
        torch.mul(self._own, self.own_share(), out=self._mean)
        coming = self.neighbors.start(0, self._own).wait()
        rank = self.neighbors.group.rank
        for source, share in self.neighbors.graph.sources(rank, 0).items():
            self._mean.add_(coming[source], alpha=share)


__all__ = ["DPSGD", "Choco", "Mixing", "PushSum", "Synchronous"]
