"""ZeRO: the replicas share the optimizer's state out, then gradients, then parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from pycoll.errors import UsageError
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
        self._units: list[tuple[nn.Module, set[str]]] = []

    def apply(self) -> None:
        if self.build.options.zero == 3:
            self._units = units_of(self.build.model, self.build.options.pp)

    def units(self) -> list[set[str]] | None:
        return [members for _, members in self._units] or None

    def attach(self, buckets: list[Any]) -> None:
        if self.build.grid.size("pp") > 1:
            return  # a pipeline uses the parameters many times, so its executor gathers them
        for module, members in self._units:
            mine = [bucket for bucket in buckets if bucket.slots[0].name in members]
            put_together_when_needed(module, mine, keep=module is self.build.model)


__all__ = ["Zero"]
