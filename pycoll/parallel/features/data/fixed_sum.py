"""Sums of gradients whose bits do not depend on which rank has which gradient.

The gradients of the virtual replicas (core/dealing.py) are the leaves of a binary tree: node i of
a level is the sum of the nodes 2 i and 2 i + 1 below it, or the former alone. A rank adds up what
it can: the nodes whose leaves it all has. Then each rank gets its share of the nodes of all ranks,
and adds up the rest of the tree.
Source: Li et al., EasyScale, SC 2023 (elastic training with the bits of a fixed number of workers).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from pycoll.parallel.core.dealing import Dealing
from pycoll.parallel.core.ledger import AxisGroup, Started

T = TypeVar("T", Tensor, None)


class Tree(Generic[T]):
    """Nodes of the tree; two whose parent has no other leaves are replaced by it.

    Attributes:
        nodes: Values by level and number in the level; leaves are on level 0. None stands for a
            value where only the keys matter.
    """

    def __init__(self, num_leaves: int) -> None:
        self._num_leaves = num_leaves
        self.nodes: dict[tuple[int, int], T] = {}

    def add(self, level: int, number: int, value: T) -> None:
        """Adds a node; its value may be overwritten."""
        while (width := -(-self._num_leaves >> level)) > 1:
            sibling = level, number ^ 1
            if sibling in self.nodes:
                other = self.nodes.pop(sibling)
                if value is not None and other is not None:
                    value = value.add_(other)
            elif sibling[1] < width:
                break
            level, number = level + 1, number >> 1
        self.nodes[level, number] = value


class FixedSum:
    """Adds up flat gradients of the virtual replicas of a group."""

    def __init__(self, group: AxisGroup, dealing: Dealing, share: int) -> None:
        """Prepares the sums.

        Args:
            group: The replicas.
            dealing: Which virtual replicas each of them has.
            share: Elements of each rank's share; a gradient has one for each rank.
        """
        self._group, self._share, self._num_leaves = group, share, dealing.num_parts
        self._keys: list[list[tuple[int, int]]] = []  # of the nodes of each rank
        for rank in range(group.size):
            of_rank: Tree[None] = Tree(self._num_leaves)
            for number in dealing.parts_of(rank):
                of_rank.add(0, number, None)
            self._keys.append(sorted(of_rank.nodes))
        self._mine: Tree[Tensor] = Tree(self._num_leaves)
        self._started: Started | None = None
        self._coming = torch.empty(0)

    def add(self, number: int, gradient: Tensor) -> None:
        """Adds the gradient of a virtual replica; it may be overwritten."""
        self._mine.add(0, number, gradient)

    def start(self, like: Tensor) -> None:
        """Starts to exchange shares, when the gradients of all virtual replicas of this rank came.

        Args:
            like: A tensor of the gradients' dtype and device.

        Cost: each node of a rank is sent once, but for its own share: one if the number of virtual
            replicas is a power of two times that of the replicas, else up to
            2 log2(virtual replicas / replicas) + 1.
        """
        size = self._group.size
        nodes = [self._mine.nodes[key] for key in self._keys[self._group.rank]]
        rows = [node.view(size, -1) for node in nodes] or [like.new_empty(size, 0)]
        going = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        there = [self._share * len(nodes)] * size
        here = [self._share * len(keys) for keys in self._keys]
        self._coming = like.new_empty(sum(here))
        counts = {"send_counts": there, "recv_counts": here}
        going = going.view(-1)
        self._started = self._group.start("all_to_all", going, going, self._coming, **counts)
        self._mine.nodes.clear()

    def finish(self) -> Tensor | None:
        """Waits, and returns this rank's share of the sum; None: there is no exchange."""
        if self._started is None:
            return None
        self._started.wait()
        self._started = None
        sums: Tree[Tensor] = Tree(self._num_leaves)
        keys = [key for of_rank in self._keys for key in of_rank]
        for key, value in zip(keys, self._coming.split(self._share), strict=True):
            sums.add(*key, value)
        ((_, total),) = sums.nodes.items()
        self._coming = torch.empty(0)
        return total.clone()

    def clear(self) -> None:
        """Forgets gradients that were added."""
        self._mine.nodes.clear()


__all__ = ["FixedSum", "Tree"]
