"""What the runtime asks of a model: to run one of its stages. And the plainest such model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from pycoll.errors import UsageError

Notes = dict[str, Any]  # what a stage tells those behind it, when shapes are new
Tensors = tuple[torch.Tensor, ...]


class Stages(Protocol):
    """A model as stages, of which some are here."""

    @property
    def num_stages(self) -> int: ...

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages that this rank holds, in the model's order."""

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several stages have, here or elsewhere, and which stages."""

    def parameters_of(self, stage: int) -> dict[str, torch.nn.Parameter]:
        """The parameters of a local stage by name."""

    def shared_parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter of `shared` that a local stage has."""

    def forward(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensors | None,
        notes: Notes,
        replaced: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Runs a local stage.

        Args:
            stage: Which.
            args: Of the model, for this microbatch; empty where the rank was given no inputs.
            kwargs: As `args`.
            hidden: What the stage before has made; None for the first stage.
            notes: What earlier stages have noted of microbatches of these shapes; this stage adds
                its own.
            replaced: Tensors to use in place of parameters of these names.

        Returns:
            A tuple of tensors for the next stage, or of the last stage the model's output.
        """


class ModuleStages:
    """Stages that are modules of their own: each takes what the one before returns."""

    def __init__(self, modules: Mapping[int, torch.nn.Module], num_stages: int) -> None:
        """Takes the modules of the local stages.

        Args:
            modules: The module of each local stage. The first stage takes the model's inputs; a
                stage that returns a tuple of tensors calls the next one with several arguments.
            num_stages: Of the whole model.

        Raises:
            UsageError: a stage that is none.
        """
        strangers = [stage for stage in modules if stage not in range(num_stages)]
        if strangers or not modules:
            raise UsageError(
                f"modules are given for stages {sorted(modules)}, expected some of "
                f"0..{num_stages - 1}"
            )
        self._modules = dict(sorted(modules.items()))
        self.num_stages = num_stages
        self.local_stages = tuple(self._modules)
        self.shared: dict[str, tuple[int, ...]] = {}

    def modules(self) -> Iterator[Any]:
        """The modules of the local stages, in their order."""
        return iter(self._modules.values())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Those of all local stages, once each."""
        return torch.nn.ModuleList(self._modules.values()).parameters()

    def parameters_of(self, stage: int) -> dict[str, torch.nn.Parameter]:
        return dict(self._modules[stage].named_parameters())

    def shared_parameter(self, name: str) -> torch.nn.Parameter:
        raise KeyError(name)

    def forward(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensors | None,
        notes: Notes,
        replaced: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        inputs, named = (args, kwargs) if hidden is None else (hidden, {})
        module = self._modules[stage]
        if replaced is not None:
            made = torch.func.functional_call(module, dict(replaced), inputs, named)
        else:
            made = module(*inputs, **named)
        if stage == self.num_stages - 1:
            return made
        made = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        if not all(isinstance(value, torch.Tensor) for value in made):
            kinds = ", ".join(type(value).__name__ for value in made)
            raise UsageError(f"stage {stage} returns {kinds}; expected tensors for the next stage")
        return made


__all__ = ["ModuleStages", "Notes", "Stages", "Tensors"]
