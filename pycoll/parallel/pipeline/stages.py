"""The interface by which the runtime runs a model's stages, and its simplest implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from pycoll.errors import UsageError

Notes = dict[str, Any]  # a stage's data for later stages, when shapes are new
Tensors = tuple[torch.Tensor, ...]


class Stages(Protocol):
    """A model in stages, some of which are on this rank."""

    @property
    def num_stages(self) -> int: ...

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of this rank, in model order."""

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several stages have, here or elsewhere, with these stages."""

    def parameters_of(self, stage: int) -> dict[str, torch.nn.Parameter]:
        """Parameters of a local stage, by name."""

    def shared_parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter in `shared` that a local stage has."""

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
            stage: The stage.
            args: Arguments of the model for this microbatch; empty if the rank has no inputs.
            kwargs: Keyword arguments, likewise.
            hidden: Output of the previous stage; None for the first stage.
            notes: Notes of earlier stages on microbatches of these shapes; this stage adds its own.
            replaced: Tensors by parameter name, to use instead of the parameters.

        Returns:
            A tuple of tensors for the next stage, or the model's output from the last stage.
        """


class ModuleStages:
    """Stages that are modules; each takes the output of the previous one."""

    def __init__(self, modules: Mapping[int, torch.nn.Module], num_stages: int) -> None:
        """Takes the modules of this rank's stages.

        Args:
            modules: The module of each local stage. The first stage takes the model's inputs. A
                stage that returns a tuple of tensors calls the next one with several arguments.
            num_stages: Number of stages of the whole model.

        Raises:
            UsageError: A key is no stage number.
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
        """The modules of the local stages, in order."""
        return iter(self._modules.values())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of all local stages, each once."""
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
