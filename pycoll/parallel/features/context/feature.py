"""Context parallelism: cp shares each sequence out from the first block on."""

from __future__ import annotations

from torch import nn

from pycoll.parallel.features.context.sequence import Sequence
from pycoll.parallel.features.feature import Build, Feature


class ContextParallel(Feature):
    """Cuts the sequence.

    Attributes:
        sequence: The sequence of a batch, of which this rank has a share.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        grid = build.grid
        tensor = grid.line("tp") if build.options.sequence_parallel else None
        self.sequence = Sequence(grid.line("cp"), build.positions, tensor)

    def apply(self) -> None:
        build = self.build
        self.sequence.cut(build.model, build.options.pp, staged=build.grid.size("pp") > 1)

    def sums_over(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("cp",)

    def splits_tokens(self) -> tuple[str, ...]:
        return ("cp",)


__all__ = ["ContextParallel"]
