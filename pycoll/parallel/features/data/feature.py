"""Data parallelism: dp shares a batch out, and adds gradients up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.features.feature import Feature
from pycoll.parallel.features.pipeline import PipelineParallel
from pycoll.parallel.features.precision import MixedPrecision
from pycoll.parallel.features.zero.feature import Zero


class DataParallel(Feature):
    """Replicas with distinct samples."""

    after = (MixedPrecision, Zero, PipelineParallel)

    def sums_over(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("dp",)

    def splits_tokens(self) -> tuple[str, ...]:
        return ("dp",)

    def owns(self, name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        """The ranks share many parameters out among themselves; ZeRO gives each a piece of all."""
        return self.build.options.zero > 0 or along.rank == self.build.numbers[name] % along.size

    def make_reducer(
        self,
        mesh: Mesh,
        here: Mapping[str, nn.Parameter],
        parts: dict[int, Placement],
        bucket_bytes: int,
    ) -> Reducer:
        """What adds up the gradients, once all features have changed the model. Collective.

        Args:
            mesh: The ranks.
            here: This rank's parameters by name.
            parts: Placements of parameters that are parts, by id.
            bucket_bytes: Size of the buckets.
        """
        build, features = self.build, self.build.features.values()
        pipelined = build[PipelineParallel]
        # A stage may have parameters that are added up along axes along which no other one adds up.
        mesh.make_lines_of_dp(build.axes_of_sums(parameter) for parameter in here.values())
        groups = [set(build.names.values())]
        for units in [found for each in features if (found := each.units()) is not None]:
            groups = [of & members for members in units for of in groups]
        return Reducer(
            [(name, parameter) for name, parameter in here.items() if parameter.requires_grad],
            group_of=partial(build.group_of, mesh),
            everyone=[
                name
                for name in build.learning
                if name in here or any(each.agrees_on(name, here) for each in features)
            ],
            owned=lambda *of: all(each.owns(*of) for each in features),
            placements=parts,
            level=build.options.zero,
            groups=groups,
            bucket_bytes=bucket_bytes,
            reduce=build[MixedPrecision].reduce,
            split=build[Zero].split,
            late=() if pipelined.cut is None else pipelined.cut.shared,
            dealing=mesh.dealing() if mesh.virtual_replicas else None,
        )


__all__ = ["DataParallel"]
