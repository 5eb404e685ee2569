"""ZeRO: the replicas share the optimizer's state out, then gradients, then parameters."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.experts import ExpertParallel
from pycoll.parallel.features.feature import Build, Feature
from pycoll.parallel.features.tensor.feature import TensorParallel
from pycoll.parallel.features.zero.zero_units import put_together_when_needed, units_of


class Zero(Feature):
    """Finds the units that ZeRO 3 gathers at once."""

    after = (ContextParallel, ExpertParallel, TensorParallel)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if build.options.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero is {build.options.zero}, expected 0, 1, 2 or 3")
        self._group = build.options.zero_group
        self._splits: dict[str, tuple[AxisGroup, AxisGroup | None]] = {}
        replicas = build.grid.line_of_dp("ep", "cp").size
        if self._group is not None and (self._group < 1 or replicas % self._group):
            raise UsageError(
                f"zero_group is {self._group}, expected a divisor of {replicas}, the number of "
                "replicas"
            )
        self._units: list[tuple[nn.Module, set[str]]] = []

    def apply(self) -> None:
        if self.build.options.zero == 3:
            self._units = units_of(self.build.model, self.build.options.pp)

    def share_of(self, group: AxisGroup) -> tuple[int, int]:
        """The number of shares of what a group of ranks holds, and this rank's."""
        size = group.size if self._group is None else math.gcd(self._group, group.size)
        return size, group.rank % size

    def split(self, group: AxisGroup) -> tuple[AxisGroup, AxisGroup | None]:
        """The ranks that shard what a group holds, and those with the same share. Collective."""
        size, share = self.share_of(group)
        if size == group.size:
            return group, None
        if group.axis not in self._splits:
            shares = group.comm.split(group.rank // size, group.rank)
            copies = group.comm.split(share, group.rank)
            assert shares is not None and copies is not None
            self._splits[group.axis] = (
                AxisGroup.over(shares, f"{group.axis} shares", group.ledger, group.device),
                AxisGroup.over(copies, f"{group.axis} copies", group.ledger, group.device),
            )
        return self._splits[group.axis]

    def owns(self, name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        copies = self.split(along)[1] if self.build.options.zero else None
        return copies is None or copies.rank == self.build.numbers[name] % copies.size

    def units(self) -> list[set[str]] | None:
        return [members for _, members in self._units] or None

    def attach(self, buckets: list[Any]) -> None:
        if self.build.grid.size("pp") > 1:
            return  # a pipeline uses the parameters many times, so its executor gathers them
        for module, members in self._units:
            mine = [bucket for bucket in buckets if bucket.slots[0].name in members]
            put_together_when_needed(module, mine, keep=module is self.build.model)


__all__ = ["Zero"]
