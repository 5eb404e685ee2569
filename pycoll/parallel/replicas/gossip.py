"""Decentralized training: replicas average their weights with neighbors, not with all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.graph import Graph
from pycoll.parallel.replicas.compression import Compressor, compressor_of
from pycoll.parallel.replicas.mixing import DPSGD, Choco, Mixing, PushSum
from pycoll.parallel.replicas.pairwise import Pairwise
from pycoll.parallel.replicas.weights import Neighbors, Weights, group_of_all

MODES = ("dpsgd", "sgp", "adpsgd")


class Gossip(optim.Optimizer):
    """Steps this rank's weights by its own gradients, and mixes them with its neighbors'.

    Attributes:
        inner: The torch optimizer.
        graph: The neighbors.
    """

    def __init__(
        self,
        inner: optim.Optimizer,
        graph: Graph,
        mode: str,
        compress: str | Compressor | None,
        group: AxisGroup | None,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"gossip: mode={mode!r}, expected one of {', '.join(MODES)}")
        compressor = compressor_of(compress)
        if compressor is not None and mode != "dpsgd":
            raise UsageError(f"gossip: compress= needs mode='dpsgd', found mode={mode!r}")
        self.inner, self.graph = inner, graph
        self._mode, self._compressor = mode, compressor
        self._neighbors = Neighbors(group or group_of_all(), graph)
        self._mixing: Mixing | None = None
        super().__init__(inner.param_groups, inner.defaults)
        self._share()

    def _share(self) -> None:
        """One state and one list of groups for both optimizers."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _weights(self) -> Weights:
        return Weights(p for group in self.param_groups for p in group["params"])

    def _made(self) -> Mixing:
        """The mixing; made at the first step, because pc.optimizer changes the groups before."""
        if self._mixing is None:
            weights, neighbors = self._weights(), self._neighbors
            if self._mode == "sgp":
                self._mixing = PushSum(weights, neighbors)
            elif self._mode == "adpsgd":
                self._mixing = Pairwise(weights, neighbors)
            elif self._compressor is not None:
                self._mixing = Choco(weights, neighbors, self._compressor)
            else:
                self._mixing = DPSGD(weights, neighbors)
        return self._mixing

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, and mixes the weights with those of this round's neighbors.

        Args:
            closure: Called first, with gradients enabled; computes them.

        Returns:
            What the closure returned.

        Raises:
            PeerDiedError: A neighbor has ended.
            TimeoutError: A neighbor has not made its step within the communicator's deadline.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._made().step(lambda: self.inner.step() and None)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the inner optimizer; weights are loaded before."""
        if self._mixing is not None:
            self._mixing.forget()
        self.inner.load_state_dict(state_dict)
        self._share()

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer."""
        return self.inner.state_dict()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """The root mean square over the replicas of the distance of their weights from the mean.

        Collective.

        Cost: an all_reduce of the weights.
        """
        weights = self._weights()
        mine = weights.new()
        weights.read(mine)
        apart = mine - self._neighbors.mean(mine.clone())
        return float(self._neighbors.mean(apart.double().square().sum().view(1)).sqrt())

    @contextmanager
    def mean_weights(self) -> Iterator[None]:
        """Within, every replica has the mean of all weights: to evaluate or save. Collective.

        Cost: an all_reduce of the weights.
        """
        weights = self._weights()
        mine = weights.new()
        with torch.no_grad():
            weights.read(mine)
            weights.write(self._neighbors.mean(mine.clone()))
        try:
            yield
        finally:
            with torch.no_grad():
                weights.write(mine)

    def close(self) -> None:
        """Ends the exchange. Collective, after the last step."""
        if self._mixing is not None:
            self._mixing.close()
        else:
            self._neighbors.close()


def gossip(
    optimizer: optim.Optimizer,
    graph: Graph,
    mode: str = "dpsgd",
    *,
    compress: str | Compressor | None = None,
    group: AxisGroup | None = None,
) -> Gossip:
    """Makes an optimizer of torch decentralized: each step averages weights with neighbors.

    Each rank computes gradients of its own data by its own weights; no step waits for all ranks.

    Args:
        optimizer: A torch optimizer of a model that all ranks made with the same weights.
        graph: Who the neighbors are, in each step: see `pc.graph`.
        mode: "dpsgd": all neighbors of a round exchange weights while they compute gradients.
            "sgp": stochastic gradient push, for graphs of one-way edges, too. "adpsgd": after a
            step, a rank averages with one random neighbor, which does not wait.
        compress: "int8", "topk", "topk:SHARE" or a Compressor: exchanges compressed differences
            (CHOCO-SGD); None: whole weights.
        group: The replicas; None: all ranks of the job.

    Returns:
        The optimizer; call its `step()` after each backward pass.

    Raises:
        UsageError: The graph is of another number of ranks, or does not allow the mode.

    Cost: per step, one vector of all weights to each neighbor of the round, as many bytes as
        weights, or as the compressor says; one pair per step for "adpsgd".

    Source: arXiv:1705.09056 (dpsgd), arXiv:1811.10792 (sgp), arXiv:1710.06952 (adpsgd),
        arXiv:1902.00340 (compress).
    """
    return Gossip(optimizer, graph, mode, compress, group)


__all__ = ["MODES", "Gossip", "gossip"]
