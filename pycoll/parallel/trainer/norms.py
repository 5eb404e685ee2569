"""Norms of gradients over all ranks, which an optimizer that does not clip need not wait for."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from pycoll.parallel.core.lateness import PARTS, Late, latest
from pycoll.parallel.core.ledger import Started
from pycoll.parallel.trainer.trainer import Trainer


class Norms:
    """Norms of all ranks' gradients, and times of all ranks, while they are added up."""

    def __init__(self, sums: Tensor, count: int, started: Started | None) -> None:
        """Takes what is being added up.

        Args:
            sums: `count` squares of norms, and the times of each rank.
            count: Number of squares.
            started: The all_reduce; None: there is one rank.
        """
        self._sums, self._count, self._started = sums, count, started

    @cached_property
    def _found(self) -> tuple[list[float], Late | None]:
        if self._started is None:
            return self._sums.tolist(), None
        self._started.wait()
        times = self._sums[self._count :].view(-1, len(PARTS)).tolist()
        return self._sums[: self._count].tolist(), latest(times)

    def wait(self) -> None:
        """Waits for the norms of all ranks."""
        self.squares  # noqa: B018

    @property
    def squares(self) -> list[float]:
        """Squares of the norms of each group, and of what is in none; waits for them."""
        return self._found[0]

    @property
    def total(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(sum(self.squares))

    @property
    def late(self) -> Late | None:
        """The rank that the others waited for."""
        return self._found[1]

    def factors(self, clips: list[float | None], clip: float | None) -> list[float]:
        """What the gradients of each group are multiplied by.

        Args:
            clips: The largest norm of each group; None: the group is scaled with the others that
                have none.
            clip: The largest norm of these together; None: no limit.
        """
        pairs = list(zip(self.squares, clips, strict=True))
        rest = math.sqrt(sum(square for square, own in pairs if own is None))
        return [
            _factor(clip, rest) if own is None else _factor(own, math.sqrt(square))
            for square, own in pairs
        ]


def _factor(clip: float | None, norm: float) -> float:
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def start_norms(trainer: Trainer, groups: dict[int, int], num_groups: int) -> Norms:
    """Starts to add up norms of gradients and the times of ranks, over all ranks.

    Args:
        trainer: Has the gradients.
        groups: Numbers of the optimizer's groups, by the ids of the pieces' values.
        num_groups: Number of groups.
    """
    total = torch.zeros(num_groups + 1, dtype=torch.float64)
    norms: dict[int, list[Tensor]] = {}
    for piece in trainer.reducer.pieces.values():
        if piece.owned and piece.value.grad is not None:
            norm = torch.linalg.vector_norm(piece.value.grad).double()
            norms.setdefault(groups.get(id(piece.value), num_groups), []).append(norm)
    if norms:  # a device is waited for once
        sums = [torch.stack(of_group).square().sum() for of_group in norms.values()]
        total[list(norms)] = torch.stack(sums).cpu()
    mesh = trainer.mesh
    if mesh.world.size == 1:
        return Norms(total, num_groups + 1, None)
    times = torch.zeros(mesh.world.size, len(PARTS), dtype=torch.float64)
    times[mesh.world.rank] = torch.tensor(trainer.busy_s, dtype=torch.float64)
    both = torch.cat([total, times.view(-1)])
    started = mesh.line(*mesh.sizes).start("all_reduce", both, both)
    return Norms(both, num_groups + 1, started)


__all__ = ["Norms", "start_norms"]
