"""Modules placed by name: each rank of pp keeps the modules that it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.features.feature import Build, Feature
from pycoll.parallel.features.pipeline import PipelineParallel
from pycoll.parallel.features.place.places import ModulePlaces, check_names
from pycoll.parallel.features.place.segments import Segments, segments_of
from pycoll.parallel.features.recompute import Recompute
from pycoll.parallel.features.zero.feature import Zero
from pycoll.parallel.pipeline.parts import Absent


class Placed:
    """A model with only the modules of this rank.

    Attributes:
        model: The model itself.
        places: The ranks of its modules.
    """

    def __init__(self, model: nn.Module, places: ModulePlaces, rank: int) -> None:
        self.model, self.places, self._rank = model, places, rank
        self._made: dict[int, Segments] = {}

    def segments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Segments:
        """The segments of a call, as in `Tracer.trace`."""
        graph = self.places.tracer.trace(args, kwargs, self.model.training)
        if id(graph) not in self._made:
            self._made[id(graph)] = segments_of(graph, self.places.ranks(graph))
        return self._made[id(graph)]

    def remove_others(self) -> None:
        """Removes the modules and parameters of other ranks, in place."""
        here = {name for name, rank in self.places.parameters.items() if rank == self._rank}
        first_names = {id(p): name for name, p in self.model.named_parameters()}
        named = list(self.model.named_modules(remove_duplicate=False))
        calls = {id(self.model.get_submodule(name)): name for name in self.places.modules}
        keep = {
            id(each)
            for name, rank in self.places.modules.items()
            if rank == self._rank
            for each in self.model.get_submodule(name).modules()
        }
        for name, module in named:
            parent, _, child = name.rpartition(".")
            elsewhere = id(module) in calls and id(module) not in keep
            if elsewhere and _has_state(module):
                holder = self.model.get_submodule(parent)
                rank = self.places.modules[calls[id(module)]]
                holder._modules[child] = Absent(module, _Elsewhere(name, rank), keep)
        for _, module in self.model.named_modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None and first_names[id(parameter)] not in here:
                    del module._parameters[key]


class _Elsewhere:
    """What a module of another rank answers."""

    def __init__(self, name: str, rank: int) -> None:
        self._text = f"{name} is not on this rank, but on rank {rank} of pp: call model.step"

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses a call."""
        raise UsageError(self._text)

    def weight(self, meta: torch.Tensor, device: str) -> torch.Tensor:
        """Returns the weight without values."""
        return meta


class PlaceParallel(Feature):
    """Places modules on ranks.

    Attributes:
        placed: The placed model; None: nothing is placed, or pp is 1.
    """

    after = (PipelineParallel, Recompute, Zero)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        place, world = build.options.place, build.grid.size("pp")
        self.placed: Placed | None = None
        if place is None:
            return
        check_names(build.model, place)
        self._refuse()
        if world > 1:
            places = ModulePlaces(build.model, place, world)
            self.placed = Placed(build.model, places, build.grid.rank("pp"))

    def _refuse(self) -> None:
        options, grid = self.build.options, self.build.grid
        found = {
            "pp='...', which cuts a list of blocks": options.pp,
            "a tp plan": options.tp,
            "annotate": options.annotate,
            "sequence_parallel": options.sequence_parallel,
            "recompute": options.recompute,
            "precision": options.precision,
            "zero=3": options.zero == 3,
            "a schedule, as it has an order of its own": options.schedule != "1f1b",
            **{f"{axis} > 1": grid.size(axis) > 1 for axis in ("tp", "cp", "ep")},
            "a device": grid.size("pp") > 1 and grid.line("pp").device != "cpu",
        }
        for name, asked in found.items():
            if asked:
                raise UsageError(f"parallelize: place does not go with {name}: leave one out")

    def apply(self) -> None:
        if self.placed is not None:
            self.placed.remove_others()

    def apply_meta(self) -> None:
        """Keeps all modules."""


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), next(module.buffers(), None)) is not None


__all__ = ["PlaceParallel", "Placed"]
