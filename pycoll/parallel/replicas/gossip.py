"""Decentralized training: replicas average their weights with neighbors, not with all."""

from __future__ import annotations

import time
from typing import Any

from torch import optim

from pycoll.errors import UsageError
from pycoll.parallel.core.lateness import PARTS, Late
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.graph import Graph
from pycoll.parallel.replicas.compression import Compressor, compressor_of
from pycoll.parallel.replicas.mixing import DPSGD, Choco, Mixing, PushSum
from pycoll.parallel.replicas.optimizer import ReplicaOptimizer
from pycoll.parallel.replicas.pairwise import Pairwise
from pycoll.parallel.replicas.weights import Neighbors

MODES = ("dpsgd", "sgp", "adpsgd")


class Gossip(ReplicaOptimizer):
    """Steps this rank's weights by its own gradients, and mixes them with its neighbors'.

    Attributes:
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
        super().__init__(inner, group)
        self.graph = graph
        self._mode, self._compressor = mode, compressor
        self._neighbors = Neighbors(self.group, graph)
        self._mixing: Mixing | None = None
        self._ended_s = 0.0  # of the last step

    def _made(self) -> Mixing:
        """The mixing; made at the first step, because pc.optimizer changes the groups before."""
        if self._mixing is None:
            weights, neighbors = self.weights(), self._neighbors
            if self._mode == "sgp":
                self._mixing = PushSum(weights, neighbors)
            elif self._mode == "adpsgd":
                self._mixing = Pairwise(weights, neighbors)
            elif self._compressor is not None:
                self._mixing = Choco(weights, neighbors, self._compressor)
            else:
                self._mixing = DPSGD(weights, neighbors)
        return self._mixing

    def step_and_exchange(self) -> None:
        """See ReplicaOptimizer."""
        begun_s = time.monotonic()
        alone = [begun_s - (self._ended_s or begun_s), *[0.0] * (len(PARTS) - 1)]
        self._neighbors.times.worked(self.busy_s or alone)
        self._made().step(self.inner.step)
        self._ended_s = time.monotonic()

    @property
    def late(self) -> Late | None:
        """The replica that worked longest in its last step of which this one has heard.

        Times spread from neighbor to neighbor, so after as many steps as the graph's diameter each
        replica has heard of all.
        """
        return self._neighbors.times.late

    def meet(self) -> None:
        """See ReplicaOptimizer."""
        if self._mixing is not None:
            self.group.comm.barrier()  # no neighbor asks any more
            self._mixing.settle()
        super().meet()
        if self._mixing is not None:
            self._mixing.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ReplicaOptimizer."""
        if self._mixing is not None:
            self._mixing.forget()
        super().load_state_dict(state_dict)

    def close(self) -> None:
        """Ends the exchange. Collective, after the last step."""
        if self._mixing is not None:
            self._mixing.close()
        else:
            self._neighbors.close()

    def abort(self, reason: str) -> None:
        """See ReplicaOptimizer."""
        if isinstance(self._mixing, Pairwise):
            self._mixing.abort(reason)


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
        graph: The neighbors of each rank, in each step: see `pc.graph`.
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
        weights, or as the compressor says; one pair per step for "adpsgd". Beside it, 40 bytes for
        each replica.

    Source: arXiv:1705.09056 (dpsgd), arXiv:1811.10792 (sgp), arXiv:1710.06952 (adpsgd),
        arXiv:1902.00340 (compress).
    """
    return Gossip(optimizer, graph, mode, compress, group)


__all__ = ["MODES", "Gossip", "gossip"]
