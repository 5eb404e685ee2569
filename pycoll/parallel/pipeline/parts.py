"""The parts of a cut model, and their behaviour when the model's forward calls them.

Invariant: outside of a stage's run, the parts on this rank behave as if the model were not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch

from pycoll.errors import UsageError
from pycoll.parallel.core import specs
from pycoll.parallel.pipeline.stages import Notes, Tensors

_ROLE = "_pycoll_role"


class Part(Enum):
    """Place of a module: in the list of blocks, before it, or after it."""

    BLOCK = "a block"
    BEFORE = "before the blocks"
    AFTER = "after the blocks"


class Reached(BaseException):
    """Ends a stage's run at the block behind it; a model's `except Exception` does not catch it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class Run:
    """One pass through the model's forward for one stage, blocks `first` to `end` - 1.

    Attributes:
        position: Index of the next block.
        calls: Number of calls of each module before the blocks.
    """

    first: int
    end: int
    num_blocks: int
    hidden: Tensors | None
    notes: Notes
    position: int = 0
    calls: dict[str, int] | None = None

    def nth_call(self, name: str) -> int:
        self.calls = self.calls or {}
        self.calls[name] = self.calls.get(name, -1) + 1
        return self.calls[name]


class Cutting(Protocol):
    """What a module asks of the cut model that it is part of."""

    @property
    def local_stages(self) -> Sequence[int]: ...
    @property
    def running(self) -> Run | None: ...


class Missing(Protocol):
    """What a module of another rank asks when it is called, or when its weights are used."""

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def weight(self, meta: torch.Tensor, device: str) -> torch.Tensor: ...


@dataclass(slots=True)
class Role:
    """Role of a module in a cut model; one module may be several blocks."""

    cut: Cutting
    part: Part
    indices: list[int]  # of blocks
    name: str

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module's call, returns a blank instead, or ends the run.

        Args:
            module: The function that calls the real module; None if it is on another rank.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        run = self.cut.running
        if run is None:
            if module is None:
                raise UsageError(
                    f"{self.name} is not on this rank, which holds stages "
                    f"{list(self.cut.local_stages)}: run the model with PipelineRuntime"
                )
            return module(*args, **kwargs)
        if self.part is Part.BLOCK:
            return self._block(run, module, args, kwargs)
        if self.part is Part.BEFORE and run.position == 0:
            if run.first == 0:
                return self._noted(run, f"{run.nth_call(self.name)}", module(*args, **kwargs))
            return self._blank(run, f"{run.nth_call(self.name)}")
        # Behind the last block: only the last stage's run gets here.
        if module is None or (self.part is Part.AFTER and run.position < run.num_blocks):
            place = "after" if run.position else "before"
            raise UsageError(
                f"{self.name} is registered {self.part.value}, but used {place} them: the forward "
                f"came to it at block {run.position} of {run.num_blocks}. Register the modules in "
                "the order in which they are used"
            )
        return module(*args, **kwargs)

    def _block(self, run: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position, run.position = run.position, run.position + 1
        if position not in self.indices:
            raise UsageError(
                f"the forward came to {self.name} as block {position}, expected the blocks in "
                "their order, each once"
            )
        if position == run.end:
            hidden = specs.hidden_of(args, kwargs)
            if hidden is None:
                raise UsageError(f"{self.name} was called without a tensor: there is none to send")
            raise Reached(hidden)
        if position < run.first:
            return self._blank(run, "output")
        assert module is not None  # of a local stage
        if position == run.first and run.hidden is not None:
            args, kwargs = specs.with_hidden(args, kwargs, run.hidden[0])
        return self._noted(run, "output", module(*args, **kwargs))

    def weight(self, meta: torch.Tensor, device: str) -> torch.Tensor:
        """Returns a blank for a weight of another rank's module, while its users return blanks."""
        run = self.cut.running
        if run is None:
            return meta
        if run.position > run.first or run.first == 0:
            place = "after" if run.position else "before"
            hint = f": keep it on both, with both=[{self.name!r}]" * (self.part is Part.BEFORE)
            raise UsageError(
                f"{self.name} is {self.part.value}, and its weights are used {place} them, on a "
                f"stage that does not hold them{hint}"
            )
        return replace(specs.Spec.of(meta), device=device).blank()

    def _noted(self, run: Run, what: str, output: Any) -> Any:
        key = f"{self.name}/{what}"
        if key not in run.notes:
            run.notes[key] = specs.describe(output)
        return output

    def _blank(self, run: Run, what: str) -> Any:
        try:
            return specs.blank(run.notes[f"{self.name}/{what}"])
        except KeyError:
            raise UsageError(
                f"{self.name} was not called on the first stage as it is here ({what}): the "
                "model's forward differs between ranks"
            ) from None


class Absent(torch.nn.Module):
    """Replaces a module that is on another rank: it keeps the attributes, without weights."""

    def __init__(self, module: torch.nn.Module, role: Missing, keep: set[int]) -> None:
        """Removes the weights of a module, except parts (ids) that modules here share."""
        super().__init__()
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self.__dict__["_device"] = "cpu" if first is None else first.device.type
        for holder in module.modules():
            if id(holder) in keep:
                continue
            for key, parameter in holder._parameters.items():
                if parameter is not None:
                    meta = torch.empty_like(parameter, device="meta")
                    holder._parameters[key] = torch.nn.Parameter(meta, parameter.requires_grad)
            for key, buffer in holder._buffers.items():
                if buffer is not None:
                    holder._buffers[key] = buffer.to("meta")
        self.__dict__["_template"] = module  # not registered as a submodule
        self.__dict__[_ROLE] = role

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_template"], name)
        if isinstance(value, torch.Tensor) and value.is_meta:
            return self.__dict__[_ROLE].weight(value, self.__dict__["_device"])
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ROLE].call(None, args, kwargs)

    def extra_repr(self) -> str:
        return f"{type(self._template).__name__} of another rank"


def install(module: torch.nn.Module, role: Role) -> None:
    """Makes a module's calls go through its role. It stays an instance of its class."""
    if _ROLE in module.__dict__:
        module.__dict__[_ROLE].indices += role.indices
        return
    module.__dict__[_ROLE] = role
    cls = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ROLE].call(partial(cls.__call__, self), args, kwargs)

    staged = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    module.__class__ = staged


__all__ = ["Absent", "Missing", "Part", "Reached", "Role", "Run", "install"]
