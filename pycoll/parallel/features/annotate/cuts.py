"""Cuts of tensors among the ranks of an axis, and the cuts of all tensors of one operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension that is shared out evenly.

    Attributes:
        dim: The dimension, from 0.
        blocks: Number of equal blocks of the dimension, each of which is shared out separately, as
            queries, keys and values in one tensor; a rank holds its parts of them in order.
    """

    dim: int
    blocks: int = 1

    def divides(self, shape: Shape, ranks: int) -> bool:
        """Whether a tensor can be cut so."""
        return shape[self.dim] > 0 and shape[self.dim] % (self.blocks * ranks) == 0

    def local(self, shape: Shape, ranks: int) -> Shape:
        """The shape of a rank's part."""
        return (*shape[: self.dim], shape[self.dim] // ranks, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Way:
    """How the ranks share an operator: a cut for each tensor; None is a whole tensor.

    Attributes:
        inputs: Of its tensor arguments, in order.
        outputs: Of its results.
        summed: The ranks' results are partial sums of whole ones.
    """

    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...]
    summed: bool = False


def local_shape(shape: Shape, cut: Cut | None, ranks: int) -> Shape:
    """The shape of a rank's tensor."""
    return shape if cut is None else cut.local(shape, ranks)


def through_view(cut: Cut, before: Shape, after: Shape) -> Cut | None:
    """The cut of a tensor's elements after a view gives them another shape; None: it has none.

    Along a dimension with `p` elements in front of it, within those that the view splits or merges,
    a cut of `b` blocks cuts `p b` blocks of all their elements. In the new shape the same elements
    are a cut along the dimension that these blocks end in.
    """
    for first, last in _groups(before, after):
        if not first[0] <= cut.dim < first[1]:
            continue
        blocks = math.prod(before[first[0] : cut.dim]) * cut.blocks
        front = 1
        for dim in range(*last):
            if blocks % front == 0 and blocks < front * after[dim]:
                return Cut(dim, blocks // front)
            front *= after[dim]
    return None


def _groups(before: Shape, after: Shape) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The ranges of dimensions of both shapes that have the same elements."""
    groups: list[tuple[tuple[int, int], tuple[int, int]]] = []
    i, j = 0, 0
    while i < len(before) and j < len(after):
        starts, size, other = (i, j), before[i], after[j]
        i, j = i + 1, j + 1
        while size != other:
            if size < other and i < len(before):
                size, i = size * before[i], i + 1
            elif j < len(after):
                other, j = other * after[j], j + 1
            else:
                return groups
        groups.append(((starts[0], i), (starts[1], j)))
    return groups


__all__ = ["Cut", "Shape", "Way", "local_shape", "through_view"]
