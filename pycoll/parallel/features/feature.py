"""What a feature of `parallelize` is: one thing that it does to a model, in the order of ORDER."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.mesh_sizes import AXES
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.core.positions import Positions


class Grid(Protocol):
    """What features need of a mesh; `Mesh`, or a mesh without ranks (core/meta_model.py)."""

    @property
    def sizes(self) -> dict[str, int]: ...
    def size(self, axis: str) -> int: ...
    def rank(self, axis: str) -> int: ...
    def line(self, *axes: str) -> AxisGroup: ...
    def line_of_dp(self, *axes: str) -> AxisGroup: ...


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `parallelize` that features read."""

    tp: Mapping[str, Any]
    pp: str | None
    schedule: str
    zero: int
    sequence_parallel: bool
    recompute: Any
    costs: list[float] | None
    precision: Any = None
    zero_group: int | None = None
    annotate: Any = None
    place: Mapping[str, int] | None = None
    microbatches: int = 0  # of a layout whose memory is computed; 0: not known yet


class Build:
    """A model while it is being put on a mesh.

    Attributes:
        model: The model, changed in place by one feature after the other.
        grid: The ranks.
        options: What the caller asked for.
        positions: Which samples pass through the model.
        names: The first name of each parameter in the whole model, by the parameter's id.
        features: The features, by class.
        reducer: The gradients, once all features have been applied.
    """

    def __init__(
        self, model: nn.Module, grid: Grid, options: Options, positions: Positions
    ) -> None:
        self.model, self.grid, self.options = model, grid, options
        self.positions = positions
        # A tied parameter keeps the first of its names in the whole model.
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.numbers = {name: number for number, name in enumerate(self.names.values())}
        self.learning = [name for name, p in model.named_parameters() if p.requires_grad]
        self.features: dict[type[Feature], Feature] = {}

    def axes_of_sums(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes beside dp along which a parameter's gradient is added up."""
        return beside_dp(each.sums_over(parameter) for each in self.features.values())

    def group_of(self, grid: Grid, parameter: nn.Parameter) -> AxisGroup:
        """The ranks over which a parameter's gradient is added up."""
        return grid.line_of_dp(*self.axes_of_sums(parameter))

    def __getitem__(self, kind: type[F]) -> F:
        found = self.features[kind]
        assert isinstance(found, kind)
        return found


class Feature:
    """One thing that `parallelize` does to a model.

    Its constructor refuses options, before any feature changes the model. `apply` changes the model
    in place. The other methods answer questions about the result; a feature that has no say keeps
    the answers of this class.

    Attributes:
        after: The features that must have been applied before.
        needs_barrier: Layers communicate with other replicas, so that all replicas run each
            microbatch, with an empty one if necessary.
    """

    after: ClassVar[tuple[type[Feature], ...]] = ()
    needs_barrier = False

    def __init__(self, build: Build) -> None:
        """Refuses options that do not fit.

        Raises:
            UsageError: An option is invalid, or does not fit another one.
        """
        self.build = build

    def apply(self) -> None:
        """Changes the model in place, on this rank."""

    def apply_meta(self) -> None:
        """Changes a model without values, whose memory is computed."""
        self.apply()

    def sums_over(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes along which a parameter's gradient is added up."""
        return ()

    def splits_tokens(self) -> tuple[str, ...]:
        """The axes along which ranks have distinct tokens."""
        return ()

    def owns(self, name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        """Whether this rank is the owner of a parameter among those that hold the same values.

        `along` are the ranks over which its gradient is added up.
        """
        return True

    def agrees_on(self, name: str, here: Collection[str]) -> bool:
        """Whether ranks agree on the use of a parameter that this rank, with `here`, lacks."""
        return False

    def placements(self) -> Mapping[int, Placement]:
        """Placements of parameters that are parts, by id."""
        return {}

    def units(self) -> list[set[str]] | None:
        """Disjoint sets of parameter names that no bucket mixes; None: no say."""
        return None

    def attach(self, buckets: list[Any]) -> None:
        """Hooks the model once its parameters lie in buckets of gradients."""


F = TypeVar("F", bound=Feature)


def beside_dp(axes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """All of these axes but dp, in one order on all ranks."""
    found = {axis for each in axes for axis in each}
    return tuple(axis for axis in AXES if axis in found and axis != "dp")


__all__ = ["Build", "Feature", "Grid", "Options", "beside_dp"]
