"""Which samples of a batch each replica has, and the virtual replicas among which it is dealt.

With virtual replicas, a batch is cut into a fixed number of parts, whatever the number of replicas,
and each replica has consecutive ones. So the shapes of what a replica computes at once, and the
sums of a part, do not depend on the number of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.parallel.core.placement import share


@dataclass(frozen=True, slots=True)
class Dealing:
    """How batches are dealt to replicas.

    Attributes:
        num_replicas: Number of replicas.
        rank: Number of this replica.
        num_virtual: Number of virtual replicas; 0: none, each replica has one part of a batch.
    """

    num_replicas: int
    rank: int
    num_virtual: int = 0

    @property
    def num_parts(self) -> int:
        """Number of parts of a batch."""
        return self.num_virtual or self.num_replicas

    @property
    def most_parts(self) -> int:
        """The most parts that a replica has."""
        return -(-self.num_parts // self.num_replicas)

    def parts_of(self, rank: int) -> range:
        """Numbers of the parts that a replica has."""
        return range(*share(self.num_parts, self.num_replicas, rank))

    def samples(self, size: int) -> tuple[int, int]:
        """First and last + 1 sample of this replica, of a batch of `size` samples."""
        mine = self.parts_of(self.rank)
        if not mine:
            return size, size
        return self.part(size, mine[0])[0], self.part(size, mine[-1])[1]

    def part(self, size: int, number: int) -> tuple[int, int]:
        """First and last + 1 sample of a part."""
        return share(size, self.num_parts, number)


__all__ = ["Dealing"]
