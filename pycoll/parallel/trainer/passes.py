"""Passes a replica's share of a batch through the model, one virtual replica after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import copied, nothing, num_samples, part_of, split
from pycoll.parallel.core.dealing import Dealing
from pycoll.parallel.core.losses import Loss
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.trainer.executors import Executor, Ran
from pycoll.parallel.trainer.update_policy import UpdatePolicy


@dataclass(frozen=True, slots=True)
class Share:
    """A replica's share of a batch.

    Attributes:
        x: The inputs.
        y: The targets.
        microbatches: Number of microbatches into which each of its parts is split.
        first_sample: Place of its first sample in the batch of all replicas.
        num_all: Samples of all replicas.
    """

    x: Any
    y: Any
    microbatches: int
    first_sample: int
    num_all: int


class Passes:
    """Runs an executor once for each virtual replica; once if there are none."""

    def __init__(
        self, executor: Executor, policy: UpdatePolicy, reducer: Reducer, dealing: Dealing
    ) -> None:
        self._executor, self._policy, self._reducer = executor, policy, reducer
        self._dealing = dealing

    def no_losses(self) -> Tensor:
        """Zeros, for the sums of losses: one for each virtual replica, at least one."""
        return torch.zeros(max(self._dealing.num_virtual, 1), dtype=torch.float64)

    def run(self, share: Share, loss: Loss, *, reduce: bool) -> tuple[Tensor, Ran]:
        """Forward and backward passes; arguments as in `Executor.run`.

        Returns:
            The sums of the losses of each virtual replica, 0 for those of other replicas; and what
            the passes gave together.

        Raises:
            UsageError: There are virtual replicas, and the share is not the one that is dealt.
        """
        sums, found = self.no_losses(), []
        passes = self._parts(share) if self._dealing.num_virtual else [(None, share)]
        for i, (number, part) in enumerate(passes):
            is_last = i + 1 == len(passes)
            self._reducer.part = number
            ran = self._pass(part, loss, reduce and is_last, syncing=reduce)
            if self._dealing.num_virtual:
                self._reducer.drop()  # microbatches without a reduction leave parameters gathered
            if not is_last:
                self._reducer.fold()
            sums[number or 0] += ran.loss_sum
            found.append(ran)
        return sums, found[0] if len(found) == 1 else _together(found)

    def _pass(self, share: Share, loss: Loss, reduce: bool, *, syncing: bool) -> Ran:
        parts = split(share.x, share.y, share.microbatches)
        num_parts = self._policy.begin(len(parts), syncing=syncing)
        if self._executor.runs_empty:
            num_parts = max(num_parts, share.microbatches)
        parts += [nothing(share.x, share.y)] * (num_parts - len(parts))
        return self._executor.run(parts, loss, share.first_sample, reduce=reduce)

    def _parts(self, share: Share) -> list[tuple[int | None, Share]]:
        """The virtual replicas of this rank and their shares; all ranks have as many of them.

        A rank that has fewer begins with None, for which there are no samples.
        """
        dealing, size = self._dealing, share.num_all
        start, stop = dealing.samples(size)
        if stop - start != num_samples(share.x):
            raise UsageError(
                f"step: this replica has {num_samples(share.x)} of {size} samples, expected "
                f"{stop - start} with virtual_replicas={dealing.num_virtual}: take the batches of "
                "pc.loader or pc.shard, which cut them so"
            )
        numbers = dealing.parts_of(dealing.rank)
        found: list[tuple[int | None, Share]] = []
        for number in numbers:
            first, last = dealing.part(size, number)
            # Products of matrices may round differently where their memory begins elsewhere.
            x, y = (
                copied(part_of(each, first - start, last - start)) for each in (share.x, share.y)
            )
            found.append((number, Share(x, y, share.microbatches, first, size)))
        empty = Share(*nothing(share.x, share.y), share.microbatches, start, size)
        return [(None, empty)] * (dealing.most_parts - len(numbers)) + found


def _together(found: list[Ran]) -> Ran:
    busy_s: dict[str, float] = {}
    for ran in found:
        for part, seconds in ran.busy_s.items():
            busy_s[part] = busy_s.get(part, 0.0) + seconds
    return Ran(
        sum(ran.loss_sum for ran in found),
        sum(ran.count for ran in found),
        sum(ran.bubble_s for ran in found),
        max(ran.staleness for ran in found),
        busy_s,
    )


class FixedOrder(UpdatePolicy):
    """Synchronous updates by gradients of virtual replicas, which are added up in one order."""

    def reduces_each(self, level: int) -> bool:
        """False: gradients of a rank's virtual replicas are added up before."""
        return False

    def refuse_sums(self, what: str) -> None:
        """Refuses what needs sums over all ranks, whose order depends on their number."""
        raise UsageError(
            f"virtual_replicas: {what} needs sums over all ranks, whose bits would depend on their "
            "number: leave it out, or take virtual_replicas=0"
        )

    def check_called_alone(self) -> None:
        """Refuses backward passes outside `model.step`."""
        raise UsageError(
            "virtual_replicas: model.step cuts the batch into virtual replicas: call "
            "model.step(x, y, loss=...) instead of model(x) and backward"
        )

    def take(self, optimizer: optim.Optimizer, clip: float | None) -> optim.Optimizer:
        """Refuses `clip`."""
        if clip is not None:
            self.refuse_sums("clip")
        return optimizer

    def begin(self, num_parts: int, *, syncing: bool) -> int:
        """Refuses `no_sync`."""
        if not syncing:
            raise UsageError(
                "no_sync adds gradients up over steps, and virtual_replicas adds up those of each "
                "step in one order: give model.step more at once, or take virtual_replicas=0"
            )
        return num_parts


def check_fixed_order(
    model: nn.Module, mesh: Mesh, reducer: Reducer, *, apart: bool, steps_within: bool
) -> None:
    """Refuses what adds up over the replicas in other ways, or not at all.

    Args:
        model: The model.
        mesh: The ranks, with virtual replicas.
        reducer: The gradients.
        apart: Replicas do not add gradients up.
        steps_within: The optimizer steps within `model.step`.

    Raises:
        UsageError: There is such a thing.
    """
    replicas = mesh.size("dp")
    reasons = {
        "replicas=": apart,
        "a schedule that steps the optimizer within model.step": steps_within,
        "batch normalization": any(isinstance(each, _BatchNorm) for each in model.modules()),
        "cp": mesh.size("cp") > 1,
        "ep": mesh.size("ep") > 1,
        "pp with zero=3": mesh.size("pp") > 1 and reducer.level == 3,
        "zero_group or sequence_parallel": any(
            bucket.group.size != replicas or bucket.shares is not bucket.group
            for bucket in reducer.buckets
        ),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UsageError(
                f"virtual_replicas={mesh.virtual_replicas}: with {what} the bits depend on the "
                "number of replicas: leave it out, or take virtual_replicas=0"
            )


__all__ = ["FixedOrder", "Passes", "Share", "check_fixed_order"]
