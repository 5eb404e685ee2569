"""Pipeline parallelism: pp cuts a list of blocks into stages, of which each rank keeps its own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.feature import Build, Feature
from pycoll.parallel.features.recompute import Recompute
from pycoll.parallel.features.zero.feature import Zero

FLUSH = "or take a schedule with a flush, such as 1f1b"


class PipelineParallel(Feature):
    """Cuts the model.

    Attributes:
        schedule: For any number of microbatches; its name builds the others.
        cut: The cut model: which stages are where; None: pp is 1.
    """

    after = (Recompute, Zero)  # Zero lists the parameters of the whole model

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        num_ranks, options = build.grid.size("pp"), build.options
        self.cut: pipeline.Cut | None = None
        if num_ranks > 1 and options.pp is None and options.place is None:
            raise UsageError(
                f"pp={num_ranks} needs the name of the list of blocks to cut, for example "
                "pp='blocks'"
            )
        stages = pipeline.generator(options.schedule).default_stages
        microbatches = options.microbatches or num_ranks
        self.schedule = pipeline.build(options.schedule, num_ranks, microbatches, stages)
        if self.schedule.updates:
            self._refuse_versions()

    def _refuse_versions(self) -> None:
        name = self.schedule.name
        if self.build.options.zero == 3:
            raise UsageError(
                f"parallelize: schedule {name!r} keeps whole versions of a stage's weights, which "
                f"zero=3 would share out: take zero=2 or less, {FLUSH}"
            )
        if self.build.options.recompute:
            raise UsageError(
                f"parallelize: recompute would use weights that schedule {name!r} has updated "
                f"since the forward: leave recompute out, {FLUSH}"
            )

    def apply(self) -> None:
        self._cut(self.schedule.stages_of(self.build.grid.rank("pp")))

    def apply_meta(self) -> None:
        self._cut(range(self.schedule.num_stages))  # one pass finds the memory of all stages

    def _cut(self, local: Iterable[int]) -> None:
        options = self.build.options
        if self.build.grid.size("pp") > 1 and options.pp is not None:
            self.cut = pipeline.cut(
                self.build.model, options.pp, self.schedule.num_stages, local, costs=options.costs
            )

    def owns(self, name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        return self.cut is None or self.cut.counts(name)

    def units(self) -> list[set[str]] | None:
        """Parameters whose gradients complete together: one stage's, or shared ones."""
        return None if self.cut is None else self.units_of(self.build.grid.rank("pp"))

    def units_of(self, rank: int) -> list[set[str]]:
        """The units of any rank of pp, whose stages are here."""
        assert self.cut is not None
        own = [self.cut.own(stage) for stage in self.schedule.stages_of(rank)]
        return [*own, set(self.cut.shared)]


__all__ = ["FLUSH", "PipelineParallel"]
